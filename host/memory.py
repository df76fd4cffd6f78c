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
    """All that its memory depends on beside the size of the latents."""

    chunk_tokens: int | None = None
    """Tokens at once."""
    cache: CacheSettings | None = None
    windows: ContextWindows | None = None
    steps: int = 1

    def working_bytes(self, pair: ExpertPair, shape: Sequence[int]) -> int:
        """Bytes beside the weights for latents of `shape` [B, C, T, h, w], with a negative for each of them."""
        return working_bytes(
            pair,
            computed_shape(shape, self.windows, range(self.steps)),
            guided=True,
            chunk_tokens=self.chunk_tokens,
            cache=self.cache,
        )


def usable_bytes(device: torch.device, *, free: int | None = None, reserved: int = VRAM_RESERVE) -> int:
    """Bytes to compute in: of a GPU what is free but for `reserved`, of a CPU most of the RAM that can be taken.

    Args:
        free: what is free of the GPU, where the caller knows more than torch does.
    """
    from ..devices import available_bytes, free_bytes

    if device.type != "cuda":
        return int(AVAILABLE_SHARE * available_bytes())
    return max(0, (free_bytes(device) or 0 if free is None else free) - reserved)
