"""Wan checkpoints: file formats, key names, model detection and models on the meta device."""
