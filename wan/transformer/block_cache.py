"""Protocol of a step cache, which lets lanes skip blocks of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class SkipDecision(NamedTuple):
    """Lanes that continue after the first block."""

    lanes: Sequence[int]
    """Indices of the lanes that also pass through the remaining blocks."""
    visits: bool
    """True if the remaining blocks are visited: for these lanes, or for lanes of another worker."""


class BlockCache(Protocol):
    """Source of predicted block outputs in one forward pass. Tokens are [1, S, dim].

    Where workers share the tokens of a lane, a worker has only its own part of them after the first block.
    """

    @property
    def whole(self) -> bool:
        """True if no lane needs any block."""

    def without_blocks(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the output of the last block from all tokens of a lane; return this worker's part."""

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Record `hidden`, the first block's output for `tokens`; `tokens` may include those of other workers."""

    def choose(self) -> SkipDecision:
        """Return the lanes that continue, once the first block has computed all of them."""

    def from_first(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """Predict the output of the last block from that of the first, for a lane that does not continue."""

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """Record `hidden`, the output of the last block."""
