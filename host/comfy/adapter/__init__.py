"""`ComfyHost`, the host inside ComfyUI: progress, events, settings, workflow constants."""
