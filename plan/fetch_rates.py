"""How fast the fetches of a run went: a few ranges of rates, each with what fell into it. It never grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

RATE_BORDERS = (0, 1, 5, 20, 50, 80)
"""GB/s at which the ranges begin; a border belongs to the range above it."""


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """What one route did at the rates of one range."""

    from_gb_per_s: int
    """One of `RATE_BORDERS`."""
    fetches: int
    nbytes: int
    busy_s: float
    """Seconds of the single fetches, added up."""


def rate_range(nbytes: int, seconds: float) -> int:
    """The border at which the range of `nbytes` in `seconds` begins; no time at all belongs to the last one."""
    rate = nbytes / seconds / 1e9 if seconds > 0 else inf
    return RATE_BORDERS[bisect_right(RATE_BORDERS, rate) - 1]


def together(ranges: Iterable[RateRange]) -> tuple[RateRange, ...]:
    """One of each range, in their order, with the sums of what is given."""
    found: dict[int, RateRange] = {}
    for each in ranges:
        held = found.get(each.from_gb_per_s)
        found[each.from_gb_per_s] = each if held is None else _sum(held, each)
    return tuple(found[border] for border in sorted(found))


def _sum(one: RateRange, other: RateRange) -> RateRange:
    return replace(
        one,
        fetches=one.fetches + other.fetches,
        nbytes=one.nbytes + other.nbytes,
        busy_s=one.busy_s + other.busy_s,
    )
