"""Step cache settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from ...plan.programs import SkipRule
from ...schema import OffloadPolicy
from ..steps.errors import RequestError
from ..steps.parallel import LOCAL_FORWARD, ParallelForward
from .base import StepCache, StepLanes
from .easycache import EasySteps, computed_steps
from .first_block import FirstBlockSteps
from .mag_table import MagTable
from .magcache import Calibration, MagSteps, known_skips


@dataclass(frozen=True, kw_only=True)
class FirstBlockCache:
    """First-block cache: every step computes the first block and decides by the residual.

    The cache compares the first block's residual with the one in the last computed step. Below the
    threshold, as a relative L1 distance, a lane skips the other blocks and adds their residual from
    that step. This is the rule in diffusers' First Block Cache, except that an equal distance
    computes, so that a threshold of 0 skips nothing.
    """

    # Two from step to step. A third while other lanes are in the first block: the present
    # residual.
    cached_states: ClassVar[int] = 3
    """Largest number of kept tensors per lane, each as large as a hidden state."""

    threshold: float = 0.05
    """0 or more. Another value raises RequestError."""

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)

    @property
    def words(self) -> str:
        return f"first block, threshold {self.threshold:g}"

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """Return a new cache for a run with these steps."""
        return FirstBlockSteps(self.threshold, split)


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """MagCache: a calibrated table determines the skipped steps before the run.

    See `SkipRule`.
    """

    cached_states: ClassVar[int] = 1
    """See `FirstBlockCache.cached_states`."""

    table: MagTable
    rule: SkipRule

    @property
    def words(self) -> str:
        rule = self.rule
        return (
            f"magnitudes, threshold {rule.threshold:g}, at most {rule.max_consecutive_skips} in a "
            f"row, retention {rule.retention:g}; {self.table.source}"
        )

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """See `FirstBlockCache.start`."""
        return MagSteps(self.table, known_skips(self.table, self.rule, steps), split)


@dataclass(frozen=True, kw_only=True)
class EasyCache:
    """EasyCache: all lanes of a step are skipped while the predicted output change is small.

    The prediction needs two computed steps with the same expert, and no calibration. The last step
    is never skipped.
    """

    cached_states: ClassVar[int] = 0
    """See `FirstBlockCache.cached_states`. This cache keeps latents, and no hidden states."""

    threshold: float = 0.05
    """Relative output change since the last computed step. 0 skips nothing. A negative one raises
    RequestError."""
    retention: float = 0.2
    """Share of each expert's steps, from the first one on, that are never skipped. A value outside
    0 to 1 raises RequestError."""

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        if not 0 <= self.retention <= 1:
            raise RequestError(
                f"the cache's retention is {self.retention}: give 0 to 1 (skips nothing)"
            )

    @property
    def words(self) -> str:
        return f"easycache, threshold {self.threshold:g}, retention {self.retention:g}"

    def start(self, steps: StepLanes, split: ParallelForward = LOCAL_FORWARD) -> StepCache:
        """See `FirstBlockCache.start`."""
        return EasySteps(self.threshold, computed_steps(steps, self.retention), split)


def _check_threshold(threshold: float) -> None:
    if not (math.isfinite(threshold) and threshold >= 0):
        raise RequestError(f"the cache's threshold is {threshold}: give 0 (skips nothing) or more")


CacheSettings: TypeAlias = FirstBlockCache | MagCache | EasyCache | Calibration


def policy_with_cache(policy: OffloadPolicy, cache: CacheSettings | None) -> OffloadPolicy:
    """Return the policy for a cached run: a first-block cache makes the first block resident."""
    if not isinstance(cache, FirstBlockCache):
        return policy
    return replace(policy, pin_first_block=True)


PRESETS = {"careful": 0.03, "usual": 0.05, "fast": 0.1, "faster": 0.15, "fastest": 0.2}
"""Published first-block cache thresholds. `docs/caching.md` has the sources and the reported
quality."""
