"""Inputs of a run: requests, their checks, native ComfyUI values, masks."""
