"""L2: moves weights. Knows no Wan, no sampler, no ComfyUI."""
