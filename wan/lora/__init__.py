"""LoRA files: keys, metadata, compatibility, and their addition to streamed weights."""
