"""What a cache of steps is told: how far a step may be from the one before to take over what that has computed."""

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
    """Every step asks its first block. Raises RequestError for a threshold that is none.

    A lane leaves the other blocks out where the relative L1 distance between what the first block adds, now and in the
    step that was computed last, is below the threshold; it adds what they added then. The rule is that of diffusers'
    First Block Cache, but that an equal distance computes: a threshold of 0 leaves nothing out.
    """

    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise RequestError(f"the cache's threshold is {self.threshold}: give 0 (leaves nothing out) or more")

    @property
    def kept_states(self) -> int:
        """How many tensors of the size of a hidden state a lane has beside it where it has most.

        Two stay from step to step. While the other lanes are in the first block, what that has added lies beside them.
        """
        return 3

    @property
    def words(self) -> str:
        return f"first block, threshold {self.threshold:g}"


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """Which steps are left out is known before the run, from a table that was calibrated; see `SkipRule`."""

    table: MagTable
    rule: SkipRule

    @property
    def kept_states(self) -> int:
        """As of `FirstBlockCache`."""
        return 1

    @property
    def words(self) -> str:
        rule = self.rule
        return (
            f"magnitudes, threshold {rule.threshold:g}, at most {rule.max_consecutive_skips} in a row, retention "
            f"{rule.retention:g}; {self.table.source}"
        )


CacheSettings: TypeAlias = FirstBlockCache | MagCache


def cached_policy(policy: OffloadPolicy, cache: CacheSettings | None) -> OffloadPolicy:
    """The policy for a run with that cache: the block that is asked in every step stays."""
    return replace(policy, pin_first_block=True) if isinstance(cache, FirstBlockCache) else policy


PRESETS = {"careful": 0.03, "usual": 0.05, "fast": 0.1, "faster": 0.15, "fastest": 0.2}
"""Thresholds of a first-block cache that others have used; `docs/caching.md` says where and what they saw."""
