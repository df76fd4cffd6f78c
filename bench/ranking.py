"""Variants of a report by the seconds of a step, for the node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .figures import DEVICE_PEAK, PER_STEP, RAM_PEAK
from .report import Report, Variant


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One variant in a ranking."""

    place: int
    """Index in the report."""
    name: str
    step_s: float | None
    """Mean seconds of a step: the median over the measured runs. None if the variant failed."""
    memory: tuple[str, float] | None
    """Kind, VRAM or RAM, and the most bytes of all runs. None if unknown."""
    failed: str
    """Reason why the variant could not be run. Empty if it could."""


def ranking(report: Report) -> tuple[Rank, ...]:
    """Return the variants from the fastest step to the slowest, and those that failed last."""
    ranks = [_rank(place, variant) for place, variant in enumerate(report.variants)]
    # Sorting is stable, so variants without a time keep their order.
    return tuple(sorted(ranks, key=_order))


def _order(rank: Rank) -> float:
    return math.inf if rank.step_s is None else rank.step_s


def _rank(place: int, variant: Variant) -> Rank:
    # Runs before a failure do not count: the variant is last in any case.
    steps = None if variant.failed else PER_STEP.spread(variant)
    return Rank(
        place=place,
        name=variant.name,
        step_s=None if steps is None else steps.median,
        memory=_memory(variant),
        failed=variant.failed,
    )


def _memory(variant: Variant) -> tuple[str, float] | None:
    for kind, figure in (("VRAM", DEVICE_PEAK), ("RAM", RAM_PEAK)):
        peaks = figure.spread(variant)
        if peaks is not None:
            return kind, peaks.high
    return None
