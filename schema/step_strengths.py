"""LoRA strengths by step range, and their parser."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

LARGEST_STRENGTH = 10.0
"""Largest LoRA strength, in either sign."""
EXAMPLE = "0-1: 0, 2-3: 0.5"
SHOWN = 40
"""Most characters quoted in an error message."""

# `\d` would match digits in any script. Numbers have at most six digits.
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*:\s*(\S+)")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""Narrower than `float`: underscores and digits in other scripts do not match."""


class StepStrengthsError(ValueError):
    """Invalid strengths by steps. The message says why, and what to write instead."""


class StepRange(NamedTuple):
    """Strength in steps `first` to `last`, both included, counted from 0 in the whole schedule."""

    first: int
    last: int
    strength: float

    def __str__(self) -> str:
        steps = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{steps}: {self.strength:g}"


@dataclass(frozen=True, kw_only=True)
class StepStrengths:
    """LoRA strength in each step of a run."""

    usual: float
    """Strength in all steps outside the ranges."""
    ranges: tuple[StepRange, ...] = ()
    """Ranges without a common step."""

    @property
    def values(self) -> tuple[float, ...]:
        """All strengths."""
        return (self.usual, *(each.strength for each in self.ranges))

    @property
    def starts(self) -> frozenset[int]:
        """Steps at which the strength may change."""
        return frozenset({0}.union(*({each.first, each.last + 1} for each in self.ranges)))

    def at(self, step: int) -> float:
        """Return the strength in a step of the whole schedule."""
        return next(
            (each.strength for each in self.ranges if each.first <= step <= each.last), self.usual
        )

    def __str__(self) -> str:
        ranges = ", ".join(map(str, self.ranges))
        if ranges:
            return f"{self.usual:g} ({ranges})"
        return f"{self.usual:g}"


def parse_step_strengths(text: str) -> tuple[StepRange, ...]:
    """Parse step ranges with strengths, as in "0-1: 0, 2-3: 0.5".

    Commas, semicolons or lines divide the ranges.

    Raises:
        StepStrengthsError: a range cannot be read, runs backwards, shares a step with another one,
            or has a strength that is not a number within `LARGEST_STRENGTH`.
    """
    ranges = sorted(
        _parse_range(part.strip()) for part in re.split(r"[,;\n]", text) if part.strip()
    )
    # Sorted by first step, so only neighbours can share one.
    for before, after in pairwise(ranges):
        if after.first <= before.last:
            raise StepStrengthsError(
                f"step {after.first} has two strengths, in {str(before)!r} and in {str(after)!r}: "
                f"give ranges of steps that share no step, as in {EXAMPLE}"
            )
    return tuple(ranges)


def _parse_range(part: str) -> StepRange:
    found = _RANGE.fullmatch(part)
    if found is None:
        shown = part[:SHOWN] + "..." * (len(part) > SHOWN)
        raise StepStrengthsError(
            f"strengths by steps have {shown!r}: give the first and the last step, a "
            f"colon, and the strength, as in {EXAMPLE}"
        )
    first = int(found[1])
    last = int(found[2] or found[1])
    if last < first:
        raise StepStrengthsError(f"{part!r} ends before it begins: write {last}-{first}")
    strength = float(found[3]) if _NUMBER.fullmatch(found[3]) else math.nan
    if not -LARGEST_STRENGTH <= strength <= LARGEST_STRENGTH:  # also refuses NaN
        raise StepStrengthsError(
            f"{found[3]!r} in {part!r} is not a number from {-LARGEST_STRENGTH:g} to "
            f"{LARGEST_STRENGTH:g}: give a strength, as in {EXAMPLE}"
        )
    return StepRange(first, last, strength)
