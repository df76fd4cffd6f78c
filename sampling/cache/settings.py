"""Settings of the step caches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from ...plan import SkipRule
from ...schema import OffloadPolicy
from ..errors import RequestError
from ..loop.parallel import LOCAL_FORWARD, ParallelForward
from .base import StepCache, StepLanes
from .easycache import EasySteps, computed_steps
from .first_block import FirstBlockSteps
from .mag_table import MagTable
from .magcache import Calibration, MagSteps, known_skips


@dataclass(frozen=True, kw_only=True)
class FirstBlockCache:
    """First-block cache: every step computes its first block and decides by its residual.

    A lane skips the other blocks if the relative L1 distance between the first block's residual now and in the last
    computed step is below the threshold; it then adds the residual of the other blocks from that step. This is the rule
    of diffusers' First Block Cache, except that an equal distance computes, so that a threshold of 0 skips nothing.
    """

    # Two from step to step; a third while other lanes are in the first block: the present residual of that block.
    cached_states: ClassVar[int] = 3
    """Most tensors that the cache keeps for a lane at a time, each of the size of its hidden state."""

    threshold: float = 0.05
    """At least 0; another value raises RequestError."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise RequestError(f"the cache's threshold is {self.threshold}: give 0 (skips nothing) or more")

    @property
    def words(self) -> str:
        return f"first block, threshold {self.threshold:g}"

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """Return a new cache for a run of these steps."""
        return FirstBlockSteps(self.threshold, split)


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """MagCache: the skipped steps are known before the run, from a calibrated table; see `SkipRule`."""

    cached_states: ClassVar[int] = 1
    """See `FirstBlockCache.cached_states`."""

    table: MagTable
    rule: SkipRule

    @property
    def words(self) -> str:
        rule = self.rule
        return (
            f"magnitudes, threshold {rule.threshold:g}, at most {rule.max_consecutive_skips} in a row, retention "
            f"{rule.retention:g}; {self.table.source}"
        )

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """See `FirstBlockCache.start`."""
        return MagSteps(self.table, known_skips(self.table, self.rule, steps), split)


@dataclass(frozen=True, kw_only=True)
class EasyCache:
    """EasyCache: a step is skipped, with all its lanes, while the predicted change of the output is small.

    The prediction needs two computed steps of the same expert, and no calibration. The last step is never skipped.
    """

    cached_states: ClassVar[int] = 0
    """See `FirstBlockCache.cached_states`: it keeps latents, and no hidden states."""

    threshold: float = 0.05
    """Relative change of the output since the last computed step; 0 skips nothing. A negative one raises
    RequestError."""
    retention: float = 0.2
    """Share of each expert's steps, from its first one, that are never skipped; outside 0 to 1 raises RequestError."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise RequestError(f"the cache's threshold is {self.threshold}: give 0 (skips nothing) or more")
        if not 0 <= self.retention <= 1:
            raise RequestError(f"the cache's retention is {self.retention}: give 0 to 1 (skips nothing)")

    @property
    def words(self) -> str:
        return f"easycache, threshold {self.threshold:g}, retention {self.retention:g}"

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """See `FirstBlockCache.start`."""
        return EasySteps(self.threshold, computed_steps(steps, self.retention), split)


CacheSettings: TypeAlias = FirstBlockCache | MagCache | EasyCache | Calibration


def policy_with_cache(policy: OffloadPolicy, cache: CacheSettings | None) -> OffloadPolicy:
    """Return the policy for a run with that cache: a first-block cache makes the first block resident."""
    return replace(policy, pin_first_block=True) if isinstance(cache, FirstBlockCache) else policy


PRESETS = {"careful": 0.03, "usual": 0.05, "fast": 0.1, "faster": 0.15, "fastest": 0.2}
"""Published thresholds of first-block caches; `docs/caching.md` has the sources and the reported quality."""
