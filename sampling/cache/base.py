"""What takes steps over: the cache that a request asks for, at work in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from ...telemetry import Recorder
from ...wan import BlockCache, Lane
from ..loop.lanes import LaneName, names_of
from ..loop.parallel import LOCAL_FORWARD, ParallelForward
from .first_block import FirstBlockSteps
from .magcache import MagSteps
from .settings import CacheSettings, FirstBlockCache

ComputeWith: TypeAlias = "Callable[..., list[torch.Tensor]]"
"""Lanes, and by name a `shortcut` for them -> the velocity of each."""


class StepSkip(BlockCache, Protocol):
    """A shortcut, and what came of it."""

    @property
    def skipped_lanes(self) -> int:
        """Lanes of this worker that took something over instead of blocks."""

    @property
    def skips_rest(self) -> bool:
        """Whether visits were left out that had been foreseen: those behind the first block."""


class StepCache(Protocol):
    """The cache of one run. What it keeps is of one expert at a time."""

    def known_skips(self, steps: Mapping[int, tuple[str, Sequence[LaneName]]]) -> frozenset[int]:
        """Which of the steps to come need no block: by step, its expert and its lanes."""

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> StepSkip:
        """For the forward pass of a step with these `lanes`, of which this worker computes its `own`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedCalls:
    """A cache for forward passes that are numbered as steps are, and which of them it is known to take over."""

    cache: StepCache
    skipped: frozenset[int]

    @classmethod
    def of(
        cls, settings: CacheSettings | None, calls: Mapping[int, tuple[str, Sequence[LaneName]]]
    ) -> CachedCalls | None:
        """For `calls` to come, by number their expert and lanes; None: every call computes all blocks."""
        cache = step_cache(settings, LOCAL_FORWARD)
        return None if cache is None else cls(cache=cache, skipped=cache.known_skips(calls))


class CachedPass:
    """One forward pass with a cache; use it for one."""

    def __init__(self, cache: StepCache, step: int, expert: str, lanes: Sequence[Lane], model: torch.nn.Module) -> None:
        self._cache, self._step, self._expert, self._model = cache, step, expert, model
        self._names = names_of(lanes)
        self._shortcut: StepSkip | None = None

    def forward(self, compute: ComputeWith, own: Sequence[Lane]) -> list[torch.Tensor]:
        """The velocity of each of the `own` lanes of this worker, from `compute` or from a step before."""
        self._shortcut = self._cache.begin(self._step, self._expert, self._names, names_of(own), self._model)
        return compute(own, shortcut=self._shortcut)

    @property
    def skips_rest(self) -> bool:
        """See `StepSkip.leaves_rest`."""
        assert self._shortcut is not None, "asked after the pass"
        return self._shortcut.skips_rest

    def record(self, recorder: Recorder, *, blocks: int) -> None:
        """Note in the open step what was left out of the expert's `blocks`."""
        assert self._shortcut is not None, "told after the pass"
        skipped = blocks if self._shortcut.whole else blocks - 1 if self.skips_rest else 0
        recorder.cached(lanes=self._shortcut.skipped_lanes, visits=skipped)


def step_cache(settings: CacheSettings | None, split: ParallelForward) -> StepCache | None:
    """The cache for one run; None: every step computes all blocks."""
    if settings is None:
        return None
    if isinstance(settings, FirstBlockCache):
        return FirstBlockSteps(settings.threshold, split)
    return MagSteps(settings, split)
