"""Timelines of a run on several workers: moved in time, put one after the other, and merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..schema import StepRecord, Timeline, largest_known, together

SUMMED_TIMES = ("wall_s", "compute_s", "stall_s", "decode_s", "stall_on_read_s", "copy_s", "read_s")
SUMMED_BYTES = ("bytes_moved", "read_bytes", "copied_bytes")
PEAKS = ("device_bytes", "rss_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes", "pinned_bytes")


def shift_timeline(timeline: Timeline, by_s: float) -> Timeline:
    """Return the same timeline, `by_s` seconds later."""
    first_block_s = timeline.first_block_s
    return replace(
        timeline,
        steps=tuple(shift_step(step, by_s) for step in timeline.steps),
        first_block_s=None if first_block_s is None else by_s + first_block_s,
        phases=tuple(replace(phase, start_s=by_s + phase.start_s) for phase in timeline.phases),
        memory=tuple(replace(sample, at_s=by_s + sample.at_s) for sample in timeline.memory),
    )


def concatenate_timelines(timelines: Sequence[Timeline]) -> Timeline:
    """Return one timeline of several tasks, given in the order of their starts, all with times of the run."""
    assert timelines, "a worker without tasks has no timeline"
    first_blocks = [each.first_block_s for each in timelines if each.first_block_s is not None]
    return Timeline(
        kind="measured",
        steps=tuple(step for each in timelines for step in each.steps),
        non_block_bytes=sum(each.non_block_bytes for each in timelines),
        first_block_s=min(first_blocks, default=None),
        # Every task of a worker repeats the reason for the placement of weights.
        changes=tuple(dict.fromkeys(change for each in timelines for change in each.changes)),
        phases=tuple(phase for each in timelines for phase in each.phases),
        memory=tuple(sample for each in timelines for sample in each.memory),
        copy_rates=together(rate for each in timelines for rate in each.copy_rates),
        read_rates=together(rate for each in timelines for rate in each.read_rates),
    )


def merge_timelines(parts: Sequence[tuple[int, Timeline]], changes: Sequence[str] = ()) -> Timeline:
    """Return one timeline with one record per step over all videos, to be compared with a batch on one worker.

    Times of one data coordinate are added, because it computes its videos in turn; of several data coordinates, the
    slowest one counts. Bytes are added over all. Steps of several stages overlap, so that the sum of their times may
    exceed the duration of the run.

    Args:
        parts: (data coordinate, timeline) of every task of the leaders of groups, with each step of each video once.
        changes: appended to the changes of the timeline.
    """
    whole = concatenate_timelines([timeline for _, timeline in parts])
    rows: dict[int, list[tuple[int, StepRecord]]] = {}
    for data, timeline in parts:
        for step in timeline.steps:
            rows.setdefault(step.index, []).append((data, step))
    steps = tuple(_merge_step(rows[index]) for index in sorted(rows))
    return replace(whole, steps=steps, changes=(*whole.changes, *changes))


def shift_step(step: StepRecord, by_s: float) -> StepRecord:
    """Return the same step, `by_s` seconds later."""
    return step if step.start_s is None else replace(step, start_s=step.start_s + by_s)


def _merge_step(records: Sequence[tuple[int, StepRecord]]) -> StepRecord:
    """Merge the records of one step, given as (data coordinate, record of a leader).

    A peak is the largest measured value; None if no record has it.
    """
    steps = [step for _, step in records]
    if len(steps) == 1:
        return steps[0]
    by_row: dict[int, list[StepRecord]] = {}
    for data, step in records:
        by_row.setdefault(data, []).append(step)
    slowest = max(by_row.values(), key=lambda row: sum(step.wall_s for step in row))

    starts = [step.start_s for step in steps if step.start_s is not None]
    merged: dict[str, Any] = {name: sum(getattr(step, name) for step in slowest) for name in SUMMED_TIMES}
    merged |= {name: sum(getattr(step, name) for step in steps) for name in SUMMED_BYTES}
    merged |= {name: largest_known(getattr(step, name) for step in steps) for name in PEAKS}
    return replace(steps[0], **merged, start_s=min(starts, default=None))
