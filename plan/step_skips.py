"""Which steps of an expert may take over what its blocks added in a step before, known before the run begins.

The rule is that of MagCache (Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", 2025), as
diffusers has it: how far the size of what the blocks add has moved since it was computed last is multiplied up from
measured ratios, and the distances from 1 are added up while steps are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SkipRule:
    """How much may be left out. Raises ValueError for numbers out of range."""

    threshold: float
    """Steps are left out while the error that has added up is below this; 0: none is."""
    max_consecutive_skips: int = 2
    retention: float = 0.2
    """Share of an expert's steps, from its first one, in which nothing is left out."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold is {self.threshold}: give 0 (nothing is left out) or more")
        if self.max_consecutive_skips < 0:
            raise ValueError(f"max_consecutive_skips is {self.max_consecutive_skips}, it must be 0 or more")
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention is {self.retention}: give a share, 0 to 1")


def skipped_steps(
    stage: Sequence[int], taken: Sequence[int], ratios: Sequence[Sequence[float]], rule: SkipRule
) -> frozenset[int]:
    """The steps of one expert that need no block.

    Args:
        stage: all steps of the expert in the schedule, in order.
        taken: those of them that one run computes, in order. Nothing is known before the first one.
        ratios: for each kind of lane, by step of the schedule: the size of what the blocks added, by that of the step
            before. A step is left out only where the rule allows it for every kind.
    """
    retained = set(stage[: int(rule.retention * len(stage) + 0.5)])
    skipped: set[int] = set()
    sizes, errors, in_a_row = [1.0] * len(ratios), [0.0] * len(ratios), 0
    for place, step in enumerate(taken):
        if step in retained:
            continue
        in_a_row += 1
        sizes = [size * each[step] for size, each in zip(sizes, ratios, strict=True)]
        errors = [error + abs(1 - size) for error, size in zip(errors, sizes, strict=True)]
        if place > 0 and in_a_row <= rule.max_consecutive_skips and all(error < rule.threshold for error in errors):
            skipped.add(step)
        else:
            sizes, errors, in_a_row = [1.0] * len(ratios), [0.0] * len(ratios), 0
    return frozenset(skipped)
