"""What takes steps over: the cache that a request asks for, at work in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..wan.shortcut import Shortcut
from .cache_settings import CacheSettings, FirstBlockCache
from .first_block_cache import FirstBlockSteps
from .mag_cache import MagSteps
from .split import Split


class StepShortcut(Shortcut, Protocol):
    """A shortcut, and what came of it."""

    @property
    def cached_lanes(self) -> int:
        """Lanes of this worker that took something over instead of blocks."""

    @property
    def leaves_rest(self) -> bool:
        """Whether visits were left out that had been foreseen: those behind the first block."""


class StepCache(Protocol):
    """The cache of one run. What it keeps is of one expert at a time."""

    def known_skips(self, steps: Mapping[int, tuple[str, int]]) -> frozenset[int]:
        """Which of the steps to come need no block: by step, its expert and the number of its lanes."""

    def begin(self, step: int, expert: str, lanes: int, model: torch.nn.Module) -> StepShortcut:
        """For the forward pass of a step: `lanes` in all, of which this worker may compute some."""


def step_cache(settings: CacheSettings | None, split: Split) -> StepCache | None:
    """The cache for one run; None: every step computes all blocks."""
    if settings is None:
        return None
    if isinstance(settings, FirstBlockCache):
        return FirstBlockSteps(settings.threshold, split)
    return MagSteps(settings, split)
