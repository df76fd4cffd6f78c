"""Modules, tensors and blocks in ComfyUI's networks."""
