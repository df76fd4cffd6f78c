"""Offload engine: runs, buffers, and weights bound to modules."""
