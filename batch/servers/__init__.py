"""ComfyUI servers as backends of a batch."""
