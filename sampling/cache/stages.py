"""Step cache of a run whose LoRA strengths differ between steps: nothing is reused across a change of strength."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ...wan import Lane
from ..loop.parallel import LOCAL_FORWARD, ParallelForward
from .base import CachedPass, LaneName, StepCache, StepLanes
from .settings import CacheSettings


def start_cache(
    settings: CacheSettings, steps: StepLanes, patches: Mapping[int, int], split: ParallelForward = LOCAL_FORWARD
) -> StepCache:
    """Return a new cache for a run of these steps; it starts again where an expert goes on with another patch.

    Args:
        settings: settings of the cache.
        steps: expert and lanes of each step.
        patches: `BlockKey.patch` in each step.
        split: forward pass shared with other workers.
    """
    order = sorted(steps)
    stretches = [order[:1]]
    for before, step in pairwise(order):
        if steps[before][0] == steps[step][0] and patches[before] != patches[step]:
            stretches.append([])
        stretches[-1].append(step)
    caches = [settings.start({step: steps[step] for step in stretch}, split) for stretch in stretches]
    if len(caches) == 1:
        return caches[0]
    return _CacheOfStretches(
        {step: cache for cache, stretch in zip(caches, stretches, strict=True) for step in stretch}
    )


class _CacheOfStretches(StepCache):
    """Cache of a run that is another one in each stretch of steps; it keeps tensors of the present one."""

    def __init__(self, caches: Mapping[int, StepCache]) -> None:
        self._caches = dict(caches)
        self._present: StepCache | None = None
        self.skipped = frozenset().union(*(cache.skipped for cache in self._caches.values()))

    def predict(self, step: int, expert: str, lanes: Sequence[Lane]) -> Mapping[int, torch.Tensor]:
        """See `StepCache.predict`."""
        self._present = self._caches[step]
        # Caches of steps that are over keep tensors of the size of a hidden state for each lane.
        self._caches = {later: cache for later, cache in self._caches.items() if later >= step}
        return self._present.predict(step, expert, lanes)

    def begin(
        self, step: int, expert: str, lanes: Sequence[LaneName], own: Sequence[LaneName], model: torch.nn.Module
    ) -> CachedPass | None:
        """See `StepCache.begin`."""
        assert self._present is not None, "`predict` comes first in a step"
        return self._present.begin(step, expert, lanes, own, model)

    def record(self, lanes: Sequence[Lane], velocities: Sequence[torch.Tensor]) -> None:
        """See `StepCache.record`."""
        assert self._present is not None, "`predict` comes first in a step"
        self._present.record(lanes, velocities)
