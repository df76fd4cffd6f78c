"""Settings of the step caches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...plan import SkipRule
from ...schema import OffloadPolicy
from ..errors import RequestError
from .mag_table import MagTable


@dataclass(frozen=True, kw_only=True)
class FirstBlockCache:
    """First-block cache: every step computes its first block and decides by its residual.

    A lane skips the other blocks if the relative L1 distance between the first block's residual now and in the last
    computed step is below the threshold; it then adds the residual of the other blocks from that step. This is the rule
    of diffusers' First Block Cache, except that an equal distance computes, so that a threshold of 0 skips nothing.
    """

    threshold: float = 0.05
    """At least 0; another value raises RequestError."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise RequestError(f"the cache's threshold is {self.threshold}: give 0 (skips nothing) or more")

    @property
    def cached_states(self) -> int:
        """Most tensors that the cache keeps for a lane at a time, each of the size of its hidden state."""
        # Two from step to step; a third while other lanes are in the first block: the present residual of that block.
        return 3

    @property
    def words(self) -> str:
        return f"first block, threshold {self.threshold:g}"


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """MagCache: the skipped steps are known before the run, from a calibrated table; see `SkipRule`."""

    table: MagTable
    rule: SkipRule

    @property
    def cached_states(self) -> int:
        """See `FirstBlockCache.kept_states`."""
        return 1

    @property
    def words(self) -> str:
        rule = self.rule
        return (
            f"magnitudes, threshold {rule.threshold:g}, at most {rule.max_consecutive_skips} in a row, retention "
            f"{rule.retention:g}; {self.table.source}"
        )


CacheSettings: TypeAlias = FirstBlockCache | MagCache


def policy_with_cache(policy: OffloadPolicy, cache: CacheSettings | None) -> OffloadPolicy:
    """Return the policy for a run with that cache: a first-block cache makes the first block resident."""
    return replace(policy, pin_first_block=True) if isinstance(cache, FirstBlockCache) else policy


PRESETS = {"careful": 0.03, "usual": 0.05, "fast": 0.1, "faster": 0.15, "fastest": 0.2}
"""Published thresholds of first-block caches; `docs/caching.md` has the sources and the reported quality."""
