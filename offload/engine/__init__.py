"""Offload engine: runs, buffers, and the binding of weights to modules."""
