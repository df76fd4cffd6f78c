"""L7: translates between ComfyUI and the rooms above. No algorithm."""
