"""Denoising loop: steps, model calls, fallback on out-of-memory errors, lanes."""
