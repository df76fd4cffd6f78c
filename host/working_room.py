"""How much memory a node may compute in on a device, of what is free there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan.memory_needs import VRAM_RESERVE
from .auto_offload import AVAILABLE_SHARE

if TYPE_CHECKING:
    import torch


def working_room(device: torch.device, *, free: int | None = None, reserved: int = VRAM_RESERVE) -> int:
    """Bytes to compute in: of a GPU what is free but for `reserved`, of a CPU most of the RAM that can be taken.

    Args:
        free: what is free of the GPU, where the caller knows more than torch does.
    """
    from ..metrics import free_bytes
    from ..offload.available_memory import available_bytes

    if device.type != "cuda":
        return int(AVAILABLE_SHARE * available_bytes())
    return max(0, (free_bytes(device) or 0 if free is None else free) - reserved)
