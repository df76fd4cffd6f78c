"""Results of distributed runs: notes of every task, merged timelines, latents."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...sampling import DenoiseRequest
from ...schema import StepRecord, Timeline, together
from ..messages import StepReport, TaskResult
from .schedule import Assignment, GroupId, StageJob
from .task_run import TaskEnd

SPENT = ("wall_s", "compute_s", "stall_s", "decode_s", "stall_on_read_s", "copy_s", "read_s")
MOVED = ("bytes_moved", "read_bytes", "copied_bytes")
PEAKS = ("device_bytes", "rss_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes", "pinned_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedTimeline:
    """What one worker did of one task, as far as it is known."""

    rank: int
    """Of the worker in its pool."""
    data: int
    """Of its group."""
    start_s: float
    """When the task was sent; seconds since the run began."""
    timeline: Timeline
    """With times from the beginning of the task."""


def in_turn(computed: Iterable[MergedTimeline]) -> Timeline:
    """What one worker did in its tasks, in the order in which it took them; times from the beginning of the run."""
    parts = sorted(computed, key=lambda each: each.start_s)
    assert parts, "a worker that did nothing has no timeline"
    timelines = [part.timeline for part in parts]
    first_blocks = [
        part.start_s + part.timeline.first_block_s for part in parts if part.timeline.first_block_s is not None
    ]
    return Timeline(
        kind="measured",
        steps=tuple(moved(step, part.start_s) for part in parts for step in part.timeline.steps),
        non_block_bytes=sum(each.non_block_bytes for each in timelines),
        first_block_s=min(first_blocks, default=None),
        # Why weights are kept as they are, each task of a worker says again.
        changes=tuple(dict.fromkeys(change for each in timelines for change in each.changes)),
        phases=tuple(
            replace(phase, start_s=part.start_s + phase.start_s) for part in parts for phase in part.timeline.phases
        ),
        memory=tuple(
            replace(sample, at_s=part.start_s + sample.at_s) for part in parts for sample in part.timeline.memory
        ),
        copy_rates=together(rate for each in timelines for rate in each.copy_rates),
        read_rates=together(rate for each in timelines for rate in each.read_rates),
    )


def over_leaders(computed: Sequence[MergedTimeline], changes: Sequence[str] = ()) -> Timeline:
    """One timeline with one record per step, over all videos: what a batch on one worker would be compared with.

    `computed` is of the leaders of groups, each step of each video once. What workers of one data coordinate did of a
    step is added, as they took video after video; of workers side by side the slowest counts. Bytes are those of all.
    The steps of several stages overlap, so that their times together may be more than the run took.
    """
    whole = in_turn(computed)
    rows: dict[int, list[tuple[int, StepRecord]]] = {}
    for part in computed:
        for step in part.timeline.steps:
            rows.setdefault(step.index, []).append((part.data, moved(step, part.start_s)))
    steps = tuple(_over_rows(rows[index]) for index in sorted(rows))
    return replace(whole, steps=steps, changes=(*whole.changes, *changes))


def moved(step: StepRecord, by_s: float) -> StepRecord:
    """The same step that much later."""
    return step if step.start_s is None else replace(step, start_s=step.start_s + by_s)


def _over_rows(taken: Sequence[tuple[int, StepRecord]]) -> StepRecord:
    """One step, over the videos that went through it; (data coordinate, what its leader did)."""
    steps = [step for _, step in taken]
    if len(steps) == 1:
        return steps[0]
    by_row: dict[int, list[StepRecord]] = {}
    for data, step in taken:
        by_row.setdefault(data, []).append(step)
    slowest = max(by_row.values(), key=lambda row: sum(step.wall_s for step in row))
    began = [step.start_s for step in steps if step.start_s is not None]
    return replace(
        steps[0],
        **_sums(slowest, SPENT),
        **_sums(steps, MOVED),
        **_peaks(steps),
        start_s=min(began, default=None),
    )


def _sums(steps: Sequence[StepRecord], names: Sequence[str]) -> dict[str, Any]:
    return {name: sum(getattr(step, name) for step in steps) for name in names}


def _peaks(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """The highest known value of each figure that may be unknown."""
    found = {name: [value for step in steps if (value := getattr(step, name)) is not None] for name in PEAKS}
    return {name: max(values, default=None) for name, values in found.items()}


logger = logging.getLogger("wanstream.distributed")


@dataclass(kw_only=True, eq=False)
class TaskRecord:
    """One task of one group."""

    group: GroupId
    job: StageJob
    ranks: Sequence[int]
    """Of the workers in their pool, the leader first."""
    first_step: int
    start_s: float
    """When it was sent; seconds since the run began."""
    told: list[list[StepRecord]] = field(default_factory=list)
    """By place in the group."""
    ended: Mapping[int, TaskResult] = field(default_factory=dict)
    """By place; empty as long as it is computed."""

    @property
    def next_step(self) -> int:
        """Where the last state that the leader told stands."""
        return self.told[0][-1].index + 1 if self.told[0] else self.first_step

    def computed(self, place: int) -> MergedTimeline | None:
        """What the worker in that place has done of it; None for nothing."""
        if place in self.ended:
            timeline = self.ended[place].timeline
        elif self.told[place]:
            timeline = Timeline(kind="measured", steps=tuple(self.told[place]))
        else:
            return None
        return MergedTimeline(rank=self.ranks[place], data=self.group.data, start_s=self.start_s, timeline=timeline)


class TaskLog:
    """The notes of one run. Thread-safe; times are seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._tasks: list[TaskRecord] = []
        self._changes: list[tuple[int, str]] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._began

    def sent(self, given: Assignment, ranks: Sequence[int]) -> TaskRecord:
        """A job is given to the workers of a group."""
        task = TaskRecord(
            group=given.group,
            job=given.job,
            ranks=ranks,
            first_step=given.steps.start,
            start_s=self.now_s,
            told=[[] for _ in ranks],
        )
        with self._lock:
            self._tasks.append(task)
        return task

    def told(self, task: TaskRecord, place: int, told: StepReport) -> None:
        """A worker has told a step."""
        with self._lock:
            task.told[place].append(told.record)

    def ended(self, task: TaskRecord, end: TaskEnd) -> None:
        """No worker computes the task any more."""
        with self._lock:
            # Latents are handed on with the steps; those of a long queue must not be kept here.
            task.ended = {place: replace(each, latents=None) for place, each in end.ended.items()}

    def changed(self, item: int, words: str) -> None:
        """Something was changed on the way; it goes into the log too."""
        logger.warning("%s", words)
        with self._lock:
            self._changes.append((item, words))

    def changes(self, items: Sequence[int]) -> tuple[str, ...]:
        """What was changed while these items were computed, in order."""
        with self._lock:
            return tuple(words for item, words in self._changes if item in items)

    def leaders_timeline(self, items: Sequence[int]) -> Timeline:
        """One timeline of these items, from the leaders of all groups; see `over_leaders`."""
        leaders = [part for task in self._of(items) if (part := task.computed(0)) is not None]
        return over_leaders(leaders, self.changes(items))

    def timelines(self, items: Sequence[int]) -> dict[int, Timeline]:
        """By rank: what each worker did for these items."""
        parts: dict[int, list[MergedTimeline]] = {}
        for task in self._of(items):
            for place in range(len(task.ranks)):
                if (part := task.computed(place)) is not None:
                    parts.setdefault(part.rank, []).append(part)
        return {rank: in_turn(each) for rank, each in sorted(parts.items())}

    def gathered_bytes(self, items: Sequence[int]) -> int:
        """Bytes that workers gave each other for these items, as far as their tasks ended well."""
        return sum(ended.gathered_bytes for task in self._of(items) for ended in task.ended.values())

    def expert_switches(self) -> dict[int, int]:
        """By rank: how often a worker's expert has changed since it was started."""
        with self._lock:
            return {
                task.ranks[place]: ended.expert_switches for task in self._tasks for place, ended in task.ended.items()
            }

    def _of(self, items: Sequence[int]) -> list[TaskRecord]:
        with self._lock:
            return [task for task in self._tasks if task.job.item in items]


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributedResult:
    """A run of workers that is done."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, on the CPU."""
    sigma: float
    """The noise level that the latents are at, as of `DenoiseResult`."""
    timeline: Timeline
    """One record per step, over all its videos; see `over_leaders`. Its changes tell losses and smaller policies."""
    timelines: Mapping[int, Timeline]
    """By rank: what that worker did for it, with times from the beginning of the run or of its queue."""
    restarts: int
    """How many losses were made good by then, those of other requests of its queue among them."""
    wall_s: float
    """Seconds from the beginning of the run, or of its queue, until it was done."""
    gathered_bytes: int
    """Bytes that workers gave each other for it."""
    expert_switches: Mapping[int, int]
    """By rank: how often the worker's expert has changed since it was started."""


def make_result(
    parts: Sequence[DenoiseRequest], items: Sequence[int], ended: Sequence[StepReport], notes: TaskLog, *, restarts: int
) -> DistributedResult:
    """Put together what came of the parts of a request.

    Args:
        items: the numbers under which they were computed.
        ended: the last step of each of them.
    """
    latents = [told.state.latents for told in ended if told.state is not None]
    assert len(latents) == len(parts) == len(items), "a part did not end"
    return DistributedResult(
        latents=torch.cat(latents),
        sigma=parts[0].step_plan.end_sigma,
        timeline=notes.leaders_timeline(items),
        timelines=notes.timelines(items),
        restarts=restarts,
        wall_s=notes.now_s,
        gathered_bytes=notes.gathered_bytes(items),
        expert_switches=notes.expert_switches(),
    )
