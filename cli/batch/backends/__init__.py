"""Backends of a batch: a ComfyUI server, or the embedded host of this process."""
