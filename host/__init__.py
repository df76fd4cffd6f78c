"""L6: the door to ComfyUI, real or embedded."""
