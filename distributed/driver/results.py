"""Results of distributed runs: log of all tasks, merged timelines, latents."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...sampling import DenoiseResult, RunState
from ...schema import StepRecord, Timeline, together
from ..messages import TaskResult
from .schedule import Assignment

SUMMED_TIMES = ("wall_s", "compute_s", "stall_s", "decode_s", "stall_on_read_s", "copy_s", "read_s")
SUMMED_BYTES = ("bytes_moved", "read_bytes", "copied_bytes")
PEAKS = ("device_bytes", "rss_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes", "pinned_bytes")

logger = logging.getLogger("wanstream.distributed")


def shifted_timeline(timeline: Timeline, by_s: float) -> Timeline:
    """Return the same timeline, `by_s` seconds later."""
    first_block_s = timeline.first_block_s
    return replace(
        timeline,
        steps=tuple(shifted(step, by_s) for step in timeline.steps),
        first_block_s=None if first_block_s is None else by_s + first_block_s,
        phases=tuple(replace(phase, start_s=by_s + phase.start_s) for phase in timeline.phases),
        memory=tuple(replace(sample, at_s=by_s + sample.at_s) for sample in timeline.memory),
    )


def concatenate(timelines: Sequence[Timeline]) -> Timeline:
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


def merge_leaders(parts: Sequence[tuple[int, Timeline]], changes: Sequence[str] = ()) -> Timeline:
    """Return one timeline with one record per step over all videos, to be compared with a batch on one worker.

    Times of one data coordinate are added, because it computes its videos in turn; of several data coordinates, the
    slowest one counts. Bytes are added over all. Steps of several stages overlap, so that the sum of their times may
    exceed the duration of the run.

    Args:
        parts: (data coordinate, timeline) of every task of the leaders of groups, with each step of each video once.
        changes: appended to the changes of the timeline.
    """
    whole = concatenate([timeline for _, timeline in parts])
    rows: dict[int, list[tuple[int, StepRecord]]] = {}
    for data, timeline in parts:
        for step in timeline.steps:
            rows.setdefault(step.index, []).append((data, step))
    steps = tuple(_merge_step(rows[index]) for index in sorted(rows))
    return replace(whole, steps=steps, changes=(*whole.changes, *changes))


def shifted(step: StepRecord, by_s: float) -> StepRecord:
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

    def known(name: str) -> list[Any]:
        return [value for step in steps if (value := getattr(step, name)) is not None]

    merged: dict[str, Any] = {name: sum(getattr(step, name) for step in slowest) for name in SUMMED_TIMES}
    merged |= {name: sum(getattr(step, name) for step in steps) for name in SUMMED_BYTES}
    merged |= {name: max(known(name), default=None) for name in PEAKS}
    return replace(steps[0], **merged, start_s=min(known("start_s"), default=None))


@dataclass(kw_only=True, eq=False)
class TaskRecord:
    """Record of one task of one group."""

    assignment: Assignment
    ranks: Sequence[int]
    """Ranks of the workers in their pool, the leader's first."""
    start_s: float
    """Time at which the task was sent, in seconds since the start of the run."""
    next_step: int
    """First step after the last state that the leader handed over."""
    steps: list[list[StepRecord]] = field(default_factory=list)
    """Reported steps of each worker, by place in the group."""
    results: dict[int, TaskResult] = field(default_factory=dict)
    """Results of the workers that finished, by place."""

    def timeline(self, place: int) -> Timeline | None:
        """Return the timeline of the worker in that place, with times of the run; None if it has reported nothing."""
        if place in self.results:
            return shifted_timeline(self.results[place].timeline, self.start_s)
        measured = Timeline(kind="measured", steps=tuple(self.steps[place]))
        return shifted_timeline(measured, self.start_s) if measured.steps else None

    def without_repeated(self, timeline: Timeline) -> Timeline:
        """Return the timeline without steps that were lost with their states, and taken again in another task."""
        return replace(timeline, steps=tuple(step for step in timeline.steps if step.index < self.next_step))


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributedResult(DenoiseResult):
    """Result of a run on workers, with latents on the CPU.

    Its timeline has one record per step over all videos (see `merge_leaders`), and its changes include losses and
    smaller policies.
    """

    timelines: Mapping[int, Timeline]
    """Timeline of each worker by rank, in seconds since the start of the run."""
    restarts: int
    """Number of losses that were repaired."""
    wall_s: float
    """Seconds from the start of the run to this result."""
    gathered_bytes: int
    """Bytes that workers sent each other."""


class TaskLog:
    """Log of all tasks of one run, in seconds since its creation. Used on the thread of the run only."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._tasks: list[TaskRecord] = []
        self._changes: list[str] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def gathered_bytes(self) -> int:
        """Bytes that workers sent each other, in tasks that finished."""
        return sum(result.gathered_bytes for task in self._tasks for result in task.results.values())

    def add_task(self, assignment: Assignment, ranks: Sequence[int]) -> TaskRecord:
        """Add a task that is sent to the workers of a group now, and return its record."""
        first, steps = assignment.steps.start, [list[StepRecord]() for _ in ranks]
        task = TaskRecord(assignment=assignment, ranks=ranks, start_s=self.now_s, next_step=first, steps=steps)
        self._tasks.append(task)
        return task

    def add_change(self, message: str) -> None:
        """Add a change, and log it as a warning."""
        logger.warning("%s", message)
        self._changes.append(message)

    def result(self, sigma: float, states: Sequence[RunState | None], *, restarts: int) -> DistributedResult:
        """Return the result of the run from the last state of each part."""
        latents = [state.latents for state in states if state is not None]
        assert len(latents) == len(states), "a part did not end"
        leaders: list[tuple[int, Timeline]] = []
        parts: dict[int, list[Timeline]] = {}
        for task in self._tasks:
            for place, rank in enumerate(task.ranks):
                if (timeline := task.timeline(place)) is not None:
                    parts.setdefault(rank, []).append(timeline)
                    if place == 0:
                        leaders.append((task.assignment.group.data, task.without_repeated(timeline)))
        return DistributedResult(
            latents=torch.cat(latents),
            sigma=sigma,
            timeline=merge_leaders(leaders, self._changes),
            timelines={rank: concatenate(each) for rank, each in sorted(parts.items())},
            restarts=restarts,
            wall_s=self.now_s,
            gathered_bytes=self.gathered_bytes,
        )
