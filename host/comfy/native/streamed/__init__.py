"""ComfyUI models with streamed weights, and their patchers."""
