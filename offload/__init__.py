"""L2: moves weights. Knows no Wan, no sampler, no ComfyUI."""

from __future__ import annotations

from .attach import OffloadHandle, OffloadRun, attach_offload

__all__ = ["OffloadHandle", "OffloadRun", "attach_offload"]
