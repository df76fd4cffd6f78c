"""Adapter to a running ComfyUI. Its modules import ComfyUI and are imported only there."""
