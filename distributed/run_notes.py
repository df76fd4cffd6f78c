"""What is noted of a run while workers compute it: every task, every step that was told, every change on the way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan import StepRecord, Timeline
from .merged_timeline import Computed, in_turn, over_leaders
from .schedule import Assignment, Cell, Job
from .task_verdict import TaskEnd
from .tasks import RunEnded, StepTold

log = logging.getLogger("wanstream.distributed")


@dataclass(kw_only=True, eq=False)
class TaskNotes:
    """One task of one cell."""

    cell: Cell
    job: Job
    ranks: Sequence[int]
    """Of the workers in their pool, the leader first."""
    first_step: int
    began_s: float
    """When it was sent; seconds since the run began."""
    told: list[list[StepRecord]] = field(default_factory=list)
    """By place in the cell."""
    ended: Mapping[int, RunEnded] = field(default_factory=dict)
    """By place; empty as long as it is computed."""

    @property
    def next_step(self) -> int:
        """Where the last state that the leader told stands."""
        return self.told[0][-1].index + 1 if self.told[0] else self.first_step

    def computed(self, place: int) -> Computed | None:
        """What the worker in that place has done of it; None for nothing."""
        if place in self.ended:
            timeline = self.ended[place].timeline
        elif self.told[place]:
            timeline = Timeline(kind="measured", steps=tuple(self.told[place]))
        else:
            return None
        return Computed(rank=self.ranks[place], data=self.cell.data, began_s=self.began_s, timeline=timeline)


class RunNotes:
    """The notes of one run. Thread-safe; times are seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._tasks: list[TaskNotes] = []
        self._changes: list[tuple[int, str]] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._began

    def sent(self, given: Assignment, ranks: Sequence[int]) -> TaskNotes:
        """A job is given to the workers of a cell."""
        task = TaskNotes(
            cell=given.cell,
            job=given.job,
            ranks=ranks,
            first_step=given.steps.start,
            began_s=self.now_s,
            told=[[] for _ in ranks],
        )
        with self._lock:
            self._tasks.append(task)
        return task

    def told(self, task: TaskNotes, place: int, told: StepTold) -> None:
        """A worker has told a step."""
        with self._lock:
            task.told[place].append(told.record)

    def ended(self, task: TaskNotes, end: TaskEnd) -> None:
        """No worker computes the task any more."""
        with self._lock:
            # Latents are handed on with the steps; those of a long queue must not be kept here.
            task.ended = {place: replace(each, latents=None) for place, each in end.ended.items()}

    def changed(self, item: int, words: str) -> None:
        """Something was changed on the way; it goes into the log too."""
        log.warning("%s", words)
        with self._lock:
            self._changes.append((item, words))

    def changes(self, items: Sequence[int]) -> tuple[str, ...]:
        """What was changed while these items were computed, in order."""
        with self._lock:
            return tuple(words for item, words in self._changes if item in items)

    def leaders_timeline(self, items: Sequence[int]) -> Timeline:
        """One timeline of these items, from the leaders of all cells; see `over_leaders`."""
        leaders = [part for task in self._of(items) if (part := task.computed(0)) is not None]
        return over_leaders(leaders, self.changes(items))

    def timelines(self, items: Sequence[int]) -> dict[int, Timeline]:
        """By rank: what each worker did for these items."""
        parts: dict[int, list[Computed]] = {}
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

    def _of(self, items: Sequence[int]) -> list[TaskNotes]:
        with self._lock:
            return [task for task in self._tasks if task.job.item in items]
