"""One timeline of what several workers did: of one worker over all its tasks, and of a run over all its workers.

Times of workers are those of their own clocks; a task is put where the driver sent it, so that what the message took is
not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..plan import StepRecord, Timeline
from ..plan.fetch_rates import together

SPENT = ("wall_s", "compute_s", "stall_s", "decode_s", "stall_file_s", "copy_s", "read_s")
MOVED = ("bytes_moved", "read_bytes", "copied_bytes")
PEAKS = ("device_bytes", "rss_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes", "pinned_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """What one worker did of one task, as far as it is known."""

    rank: int
    """Of the worker in its pool."""
    data: int
    """Of its cell."""
    began_s: float
    """When the task was sent; seconds since the run began."""
    timeline: Timeline
    """With times from the beginning of the task."""


def in_turn(computed: Iterable[Computed]) -> Timeline:
    """What one worker did in its tasks, in the order in which it took them; times from the beginning of the run."""
    parts = sorted(computed, key=lambda each: each.began_s)
    assert parts, "a worker that did nothing has no timeline"
    timelines = [part.timeline for part in parts]
    first_blocks = [
        part.began_s + part.timeline.first_block_s for part in parts if part.timeline.first_block_s is not None
    ]
    return Timeline(
        kind="measured",
        steps=tuple(moved(step, part.began_s) for part in parts for step in part.timeline.steps),
        outer_bytes=sum(each.outer_bytes for each in timelines),
        first_block_s=min(first_blocks, default=None),
        # Why weights are kept as they are, each task of a worker says again.
        changes=tuple(dict.fromkeys(change for each in timelines for change in each.changes)),
        phases=tuple(
            replace(phase, began_s=part.began_s + phase.began_s) for part in parts for phase in part.timeline.phases
        ),
        memory=tuple(
            replace(sample, at_s=part.began_s + sample.at_s) for part in parts for sample in part.timeline.memory
        ),
        copy_rates=together(rate for each in timelines for rate in each.copy_rates),
        read_rates=together(rate for each in timelines for rate in each.read_rates),
    )


def over_leaders(computed: Sequence[Computed], changes: Sequence[str] = ()) -> Timeline:
    """One timeline with one record per step, over all videos: what a batch on one worker would be compared with.

    `computed` is of the leaders of cells, each step of each video once. What workers of one data coordinate did of a
    step is added, as they took video after video; of workers side by side the slowest counts. Bytes are those of all.
    The steps of several stages overlap, so that their times together may be more than the run took.
    """
    whole = in_turn(computed)
    rows: dict[int, list[tuple[int, StepRecord]]] = {}
    for part in computed:
        for step in part.timeline.steps:
            rows.setdefault(step.index, []).append((part.data, moved(step, part.began_s)))
    steps = tuple(_over_rows(rows[index]) for index in sorted(rows))
    return replace(whole, steps=steps, changes=(*whole.changes, *changes))


def moved(step: StepRecord, by_s: float) -> StepRecord:
    """The same step that much later."""
    return step if step.began_s is None else replace(step, began_s=step.began_s + by_s)


def _over_rows(taken: Sequence[tuple[int, StepRecord]]) -> StepRecord:
    """One step, over the videos that went through it; (data coordinate, what its leader did)."""
    steps = [step for _, step in taken]
    if len(steps) == 1:
        return steps[0]
    by_row: dict[int, list[StepRecord]] = {}
    for data, step in taken:
        by_row.setdefault(data, []).append(step)
    slowest = max(by_row.values(), key=lambda row: sum(step.wall_s for step in row))
    began = [step.began_s for step in steps if step.began_s is not None]
    return replace(
        steps[0],
        **_sums(slowest, SPENT),
        **_sums(steps, MOVED),
        **_peaks(steps),
        began_s=min(began, default=None),
    )


def _sums(steps: Sequence[StepRecord], names: Sequence[str]) -> dict[str, Any]:
    return {name: sum(getattr(step, name) for step in steps) for name in names}


def _peaks(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """The highest known value of each figure that may be unknown."""
    found = {name: [value for step in steps if (value := getattr(step, name)) is not None] for name in PEAKS}
    return {name: max(values, default=None) for name, values in found.items()}
