"""What the run to come computes in, for whoever makes room for it before the run is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.context_windows import ContextWindows
from ..sampling import working_bytes
from ..sampling.cache_settings import CacheSettings
from ..sampling.windows import computed_shape
from ..wan import ExpertPair


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
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
