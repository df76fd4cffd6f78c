"""Streamed experts inside ComfyUI: the memory manager entry and the sampling guider."""
