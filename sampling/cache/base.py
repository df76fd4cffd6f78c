"""Step caches: protocols, and the application of a cache to one forward pass."""

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
"""Maps lanes, and the keyword `shortcut`, to the velocity of each lane."""


class StepSkip(BlockCache, Protocol):
    """A `BlockCache` that reports the skipped lanes and visits."""

    @property
    def skipped_lanes(self) -> int:
        """Number of this worker's lanes that skipped blocks."""

    @property
    def skips_rest(self) -> bool:
        """True if the planned visits after the first block were skipped."""


class StepCache(Protocol):
    """Cache of one run; it keeps tensors of one expert at a time."""

    def known_skips(self, steps: Mapping[int, tuple[str, Sequence[LaneName]]]) -> frozenset[int]:
        """Return the steps that will need no block; `steps` maps each step to its expert and its lanes."""

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> StepSkip:
        """Begin a forward pass of a step with these `lanes`, of which this worker computes `own`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedCalls:
    """A cache for numbered calls, and the calls that it is known to skip."""

    cache: StepCache
    skipped: frozenset[int]

    @classmethod
    def of(
        cls, settings: CacheSettings | None, calls: Mapping[int, tuple[str, Sequence[LaneName]]]
    ) -> CachedCalls | None:
        """Return the cache for `calls`, a map from number to expert and lanes; None if there are no settings."""
        cache = step_cache(settings, LOCAL_FORWARD)
        return None if cache is None else cls(cache=cache, skipped=cache.known_skips(calls))


class CachedPass:
    """One forward pass with a cache."""

    def __init__(self, cache: StepCache, step: int, expert: str, lanes: Sequence[Lane], model: torch.nn.Module) -> None:
        self._cache, self._step, self._expert, self._model = cache, step, expert, model
        self._names = names_of(lanes)
        self._shortcut: StepSkip | None = None

    def forward(self, compute: ComputeWith, own: Sequence[Lane]) -> list[torch.Tensor]:
        """Return the velocity of each of this worker's `own` lanes, computed or from an earlier step."""
        self._shortcut = self._cache.begin(self._step, self._expert, self._names, names_of(own), self._model)
        return compute(own, shortcut=self._shortcut)

    @property
    def skips_rest(self) -> bool:
        """See `StepSkip.skips_rest`."""
        assert self._shortcut is not None, "only after `forward`"
        return self._shortcut.skips_rest

    def record(self, recorder: Recorder, *, blocks: int) -> None:
        """Record the skipped lanes and visits in the open step of `recorder`; the expert has `blocks` blocks."""
        assert self._shortcut is not None, "only after `forward`"
        skipped = blocks if self._shortcut.whole else blocks - 1 if self.skips_rest else 0
        recorder.cached(lanes=self._shortcut.skipped_lanes, visits=skipped)


def step_cache(settings: CacheSettings | None, split: ParallelForward) -> StepCache | None:
    """Return a new cache for one run, or None if there are no settings."""
    if settings is None:
        return None
    if isinstance(settings, FirstBlockCache):
        return FirstBlockSteps(settings.threshold, split)
    return MagSteps(settings, split)
