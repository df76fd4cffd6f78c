"""What a forward pass asks of a cache: which blocks its lanes may leave out, and what they take instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class SkipDecision(NamedTuple):
    """What is left of a forward pass after the first block."""

    lanes: Sequence[int]
    """Those that pass through the other blocks too, by their place."""
    visits: bool
    """Whether these blocks are visited at all: for such lanes, or for those of another worker."""


class BlockCache(Protocol):
    """What lanes take instead of blocks in one forward pass. Tokens are [1, S, dim].

    Where workers share the tokens of a lane, each of them has only its own behind the first block.
    """

    @property
    def whole(self) -> bool:
        """Whether no lane needs any block."""

    def without_blocks(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """What the last block would give for all tokens of a lane; the worker's own of it."""

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """The first block has made `hidden` of a lane's `tokens`, of which there may be more."""

    def choose(self) -> SkipDecision:
        """All lanes have passed the first block: which of them go on."""

    def from_first(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the last block would give for a lane that does not go on."""

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """A lane has passed the last block."""
