"""Results of distributed runs: task log, timelines, latents."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...sampling.steps import DenoiseResult, RunState
from ...schema.records import StepRecord, Timeline
from ...telemetry import concatenate_timelines, merge_timelines, shift_timeline
from ..messages import TaskResult
from ..plan.jobs import Assignment

logger = logging.getLogger("wanstream.distributed")


@dataclass(kw_only=True, eq=False)
class TaskRecord:
    """Record of one task in one group."""

    assignment: Assignment
    ranks: Sequence[int]
    """Worker ranks in the pool, leader first."""
    start_s: float
    """Time at which the task was sent, in seconds since the run started."""
    next_step: int
    """First step after the last state from the leader."""
    steps: list[list[StepRecord]] = field(default_factory=list)
    """Reported steps of each worker, by place in the group."""
    results: dict[int, TaskResult] = field(default_factory=dict)
    """Results from finished workers, by place."""

    def timeline(self, place: int) -> Timeline | None:
        """Return the timeline of the worker in this place, in the run's time.

        None if it has reported nothing.
        """
        timeline = Timeline(kind="measured", steps=tuple(self.steps[place]))
        if place in self.results:
            timeline = self.results[place].timeline
        elif not timeline.steps:
            return None
        return shift_timeline(timeline, self.start_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributedResult(DenoiseResult):
    """Result of a distributed run, with latents on the CPU.

    The timeline has one record per step over all videos (see `merge_timelines`). The changes
    include losses and smaller policies.
    """

    timelines: Mapping[int, Timeline]
    """Worker timelines by rank, in seconds since the run started."""
    restarts: int
    """Number of repaired losses."""
    wall_s: float
    """Seconds from the start to this result."""
    gathered_bytes: int
    """Bytes sent between workers."""


class TaskLog:
    """Task log for one run. Times are seconds since the log was created.

    Used on the run's thread only.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._tasks: list[TaskRecord] = []
        self._changes: list[str] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._started

    def add_task(self, assignment: Assignment, ranks: Sequence[int]) -> TaskRecord:
        """Add a task, sent now to a group's workers, and return the record."""
        task = TaskRecord(
            assignment=assignment,
            ranks=ranks,
            start_s=self.now_s,
            next_step=assignment.steps.start,
            steps=[[] for _ in ranks],
        )
        self._tasks.append(task)
        return task

    def add_change(self, message: str) -> None:
        """Add a change, and log it as a warning."""
        logger.warning("%s", message)
        self._changes.append(message)

    def result(
        self, sigma: float, states: Sequence[RunState | None], *, restarts: int
    ) -> DistributedResult:
        """Return the run's result from the last state of each part."""
        latents = [state.latents for state in states if state is not None]
        assert len(latents) == len(states), "a part did not end"
        leaders: list[tuple[int, Timeline]] = []
        parts: dict[int, list[Timeline]] = {}
        gathered_bytes = 0
        for task in self._tasks:
            gathered_bytes += sum(result.gathered_bytes for result in task.results.values())
            for place, rank in enumerate(task.ranks):
                timeline = task.timeline(place)
                if timeline is None:
                    continue
                parts.setdefault(rank, []).append(timeline)
                if place == 0:
                    # Later steps were lost with their states, and computed again in another task.
                    kept = (step for step in timeline.steps if step.index < task.next_step)
                    leader = replace(timeline, steps=tuple(kept))
                    leaders.append((task.assignment.group.data, leader))
        return DistributedResult(
            latents=torch.cat(latents),
            sigma=sigma,
            timeline=merge_timelines(leaders, self._changes),
            timelines={rank: concatenate_timelines(each) for rank, each in sorted(parts.items())},
            restarts=restarts,
            wall_s=self.now_s,
            gathered_bytes=gathered_bytes,
        )
