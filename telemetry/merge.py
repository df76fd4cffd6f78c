"""Timelines from several workers: moved in time, concatenated, and merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schema.records import StepMemory, StepRecord, Timeline, Transfers, together


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
    """Return one timeline for several tasks in order of start, with times relative to the run."""
    assert timelines, "a worker without tasks has no timeline"
    # A task without visits has no first block.
    first_blocks = [each.first_block_s for each in timelines if each.first_block_s is not None]
    return Timeline(
        kind="measured",
        steps=tuple(step for each in timelines for step in each.steps),
        non_block_bytes=sum(each.non_block_bytes for each in timelines),
        first_block_s=min(first_blocks, default=None),
        # Every task on a worker repeats the reason for the weight placement.
        changes=tuple(dict.fromkeys(change for each in timelines for change in each.changes)),
        phases=tuple(phase for each in timelines for phase in each.phases),
        memory=tuple(sample for each in timelines for sample in each.memory),
        copy_rates=together(rate for each in timelines for rate in each.copy_rates),
        read_rates=together(rate for each in timelines for rate in each.read_rates),
    )


def merge_timelines(parts: Sequence[tuple[int, Timeline]], changes: Sequence[str] = ()) -> Timeline:
    """Return one timeline with one record per step over all videos.

    It can be compared with a batch on one worker. Times within one data coordinate are added,
    because it computes its videos in turn. Among data coordinates the slowest one counts. Bytes are
    added over all. Steps in several stages overlap, so their times may add up to more than the
    run's duration.

    Args:
        parts: (data coordinate, timeline) for every task of a group leader, with each step of each
            video once.
        changes: appended to the timeline's changes.
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
    if step.start_s is None:
        return step
    return replace(step, start_s=step.start_s + by_s)


def _merge_step(records: Sequence[tuple[int, StepRecord]]) -> StepRecord:
    """Merge the records for one step, given as (data coordinate, leader's record).

    A peak is the largest measured value. None if no record has it.
    """
    steps = [step for _, step in records]
    if len(steps) == 1:
        return steps[0]
    by_row: dict[int, list[StepRecord]] = {}
    for data, step in records:
        by_row.setdefault(data, []).append(step)
    slowest = max(by_row.values(), key=lambda row: sum(step.wall_s for step in row))

    starts = [step.start_s for step in steps if step.start_s is not None]
    # Times from the slowest row, bytes from all rows.
    transfers = Transfers.total(step.transfers for step in slowest)
    all_transfers = Transfers.total(step.transfers for step in steps)
    return replace(
        # All records of a step have the same index, expert and sigma.
        steps[0],
        wall_s=sum(step.wall_s for step in slowest),
        compute_s=sum(step.compute_s for step in slowest),
        decode_s=sum(step.decode_s for step in slowest),
        transfers=replace(
            transfers,
            bytes_moved=all_transfers.bytes_moved,
            copied_bytes=all_transfers.copied_bytes,
            read_bytes=all_transfers.read_bytes,
        ),
        memory=StepMemory.peak(step.memory for step in steps),
        start_s=min(starts, default=None),
    )
