"""Transports between driver and workers, path maps and version checks."""
