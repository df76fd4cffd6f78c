"""Native ComfyUI models whose blocks stream."""
