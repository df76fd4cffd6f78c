"""Wan checkpoints: formats, key names, detection of the model, weights on the meta device."""
