"""Results of distributed runs: log of all tasks, timelines, latents."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...plan import Assignment
from ...sampling import DenoiseResult, RunState
from ...schema import StepRecord, Timeline
from ...telemetry import concatenate_timelines, merge_timelines, shift_timeline
from ..messages import TaskResult

logger = logging.getLogger("wanstream.distributed")


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
            return shift_timeline(self.results[place].timeline, self.start_s)
        measured = Timeline(kind="measured", steps=tuple(self.steps[place]))
        return shift_timeline(measured, self.start_s) if measured.steps else None

    def without_repeated(self, timeline: Timeline) -> Timeline:
        """Return the timeline without steps that were lost with their states, and taken again in another task."""
        return replace(timeline, steps=tuple(step for step in timeline.steps if step.index < self.next_step))


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributedResult(DenoiseResult):
    """Result of a run on workers, with latents on the CPU.

    Its timeline has one record per step over all videos (see `merge_timelines`), and its changes include losses and
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
            timeline=merge_timelines(leaders, self._changes),
            timelines={rank: concatenate_timelines(each) for rank, each in sorted(parts.items())},
            restarts=restarts,
            wall_s=self.now_s,
            gathered_bytes=self.gathered_bytes,
        )
