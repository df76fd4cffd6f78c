"""What ComfyUI's dynamic VRAM holds, which neither torch's counters nor ComfyUI's list of loaded models tell."""

from __future__ import annotations

from importlib.util import find_spec


def dynamic_bytes() -> int | None:
    """Bytes of device memory under dynamic VRAM, of all models; None where this ComfyUI does not use it.

    Versions before 0.12 have none; later ones use it on NVIDIA under Linux and Windows unless it is switched off.
    """
    if find_spec("comfy.memory_management") is None:
        return None
    from comfy import memory_management

    if not getattr(memory_management, "aimdo_enabled", False):
        return None
    from comfy_aimdo import control

    return int(control.get_total_vram_usage())
