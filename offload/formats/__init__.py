"""Storage formats: safetensors, GGUF, fp8, and the layout of a block in memory."""
