"""Nodes for videos of several clips: continue a clip by its latent, save and load latents, join decoded clips."""
