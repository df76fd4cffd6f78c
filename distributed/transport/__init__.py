"""Transports between driver and workers."""
