"""LoRA files: keys, metadata, compatibility checks and patches for streamed weights."""
