"""The bars of a chart: one for each step, and in long runs one for several steps together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from ..plan import StepRecord

MOST_BARS = 250
"""A bar needs some pixels of its own."""

EVERY = (1, 5, 10, 20, 50)
"""Of how many bars one is numbered."""


def bars(steps: Sequence[StepRecord], most: int = MOST_BARS) -> tuple[StepRecord, ...]:
    """The steps, or where there are more than `most`, neighbours of one expert as one, their number that of the first.

    Such a bar has the mean of their seconds, the most of their memory and all visits that were left out. Equal
    schedules give equal bars.
    """
    if len(steps) <= most:
        return tuple(steps)
    together = -(-len(steps) // (most - 2))  # each stage may end with a bar of fewer
    found: list[StepRecord] = []
    for _, stage in groupby(steps, key=lambda step: step.expert):
        members = list(stage)
        found += [_one(members[at : at + together]) for at in range(0, len(members), together)]
    return tuple(found)


def numbered_every(pitch: float, room: float) -> int:
    """Which bars get a number that takes `room` pixels, for bars `pitch` pixels apart: each, each fifth and so on.

    The first bar has one too, so that its neighbour is one bar nearer.
    """
    return next((every for every in EVERY if max(every - 1, 1) * pitch >= room), EVERY[-1])


def _one(steps: Sequence[StepRecord]) -> StepRecord:
    return replace(
        steps[0],
        wall_s=fmean(step.wall_s for step in steps),
        compute_s=fmean(step.compute_s for step in steps),
        stall_s=fmean(step.stall_s for step in steps),
        device_bytes=_most(step.device_bytes for step in steps),
        rss_bytes=_most(step.rss_bytes for step in steps),
        skipped_visits=sum(step.skipped_visits for step in steps),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
