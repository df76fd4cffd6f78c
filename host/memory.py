"""Activation memory of the next run: its inputs, and the free bytes that it may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plan import VRAM_RESERVE
from ..sampling import CacheSettings, computed_shape, working_bytes
from ..schema import ContextWindows
from ..wan import ExpertPair
from .auto_policy import AVAILABLE_SHARE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MemoryEstimateInputs:
    """Settings of a run that determine its activation memory, in addition to the size of the latents."""

    chunk_tokens: int | None = None
    """Tokens per chunk of the feed-forward; None: all at once."""
    cache: CacheSettings | None = None
    windows: ContextWindows | None = None
    steps: int = 1

    def working_bytes(self, pair: ExpertPair, shape: Sequence[int]) -> int:
        """Return activation bytes for latents of `shape` [B, C, T, h, w], with a negative lane for each sample."""
        return working_bytes(
            pair,
            computed_shape(shape, self.windows, range(self.steps)),
            guided=True,
            chunk_tokens=self.chunk_tokens,
            cache=self.cache,
        )


def usable_bytes(device: torch.device, *, free: int | None = None, reserved: int = VRAM_RESERVE) -> int:
    """Return the bytes that a run may use: free VRAM minus `reserved` on a GPU, most of the available RAM on a CPU.

    Args:
        device: the compute device.
        free: free bytes of the GPU; None: as reported by the driver.
        reserved: bytes of the GPU to leave free.
    """
    from ..devices import available_bytes, free_bytes

    if device.type != "cuda":
        return int(AVAILABLE_SHARE * available_bytes())
    return max(0, (free_bytes(device) or 0 if free is None else free) - reserved)
