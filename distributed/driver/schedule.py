"""Schedule of jobs: which group computes which steps of which video next. Pure values; nothing here computes or waits.

A *job* is one stage of one item (a video, or several in one pass). An item goes through its stages in order. A group
takes jobs of one stage only, so that no worker ever changes its expert if the stages are cut at the expert switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from ...schema import StateError

WAITING_PER_GROUP = 4
"""Largest number of items that wait before a stage, for each of its groups. Their states are in RAM."""


class GroupId(NamedTuple):
    """Data and stage coordinates of a group of workers."""

    data: int
    stage: int


class ScheduleStatus(Enum):
    """Status of a whole schedule."""

    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"
    """More losses than `max_restarts`."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Progress of one item."""

    steps: tuple[range, ...]
    """Steps of each stage. An item skips stages without steps."""
    stage: int
    """Current or next stage; the number of stages when the item is done."""
    next_step: int
    """First step that the last state does not include."""

    @property
    def is_done(self) -> bool:
        return self.stage == len(self.steps)

    @property
    def remaining(self) -> range:
        """Steps of the current stage that were not taken yet."""
        return range(self.next_step, self.steps[self.stage].stop)

    def entering(self, stage: int) -> Item:
        """Return the item before the first stage, from `stage` on, that has steps for it."""
        while stage < len(self.steps) and not self.steps[stage]:
            stage += 1
        first = self.next_step if stage == len(self.steps) else self.steps[stage].start
        return replace(self, stage=stage, next_step=first)


class Assignment(NamedTuple):
    """Next job of a free group: steps of the group's stage of an item."""

    group: GroupId
    item: int
    steps: range


@dataclass(frozen=True, kw_only=True)
class JobSchedule:
    """State of all items and groups. Every transition returns a new schedule; an illegal one raises StateError."""

    items: tuple[Item, ...]
    data: int
    """Number of groups per stage."""
    stages: int
    busy: tuple[tuple[GroupId, int], ...] = ()
    """(group, item) of the jobs that are being computed."""
    repairing: tuple[GroupId, ...] = ()
    """Groups that get no jobs until `repaired`."""
    lost: int = 0
    """Number of losses so far."""
    max_restarts: int
    """Number of losses that are repaired."""

    @classmethod
    def of(cls, steps: Sequence[Sequence[range]], *, data: int, max_restarts: int) -> JobSchedule:
        """Return the schedule before the first job.

        Args:
            steps: steps of each item, by stage.

        Raises:
            ValueError: no items, items without steps, or gaps between the stages of an item.
        """
        if not steps or len({len(stages) for stages in steps}) != 1 or not steps[0]:
            raise ValueError("nothing to schedule: give at least one item, and as many stages for each of them")
        for number, stages in enumerate(steps):
            taken = [each for each in stages if each]
            if not taken:
                raise ValueError(f"item {number} has no steps: remove it")
            if any(before.stop != after.start for before, after in pairwise(taken)):
                raise ValueError(f"the stages of item {number} have gaps between their steps: {taken}")
        items = tuple(Item(steps=tuple(stages), stage=0, next_step=0).entering(0) for stages in steps)
        return cls(items=items, data=data, stages=len(steps[0]), max_restarts=max_restarts)

    @property
    def status(self) -> ScheduleStatus:
        if all(item.is_done for item in self.items):
            return ScheduleStatus.DONE
        return ScheduleStatus.GIVEN_UP if self.lost > self.max_restarts else ScheduleStatus.RUNNING

    def groups(self) -> Iterator[GroupId]:
        """Yield all groups in the order of their ranks."""
        return (GroupId(data, stage) for data in range(self.data) for stage in range(self.stages))

    def item_of(self, group: GroupId) -> int:
        """Return the item that a busy group computes."""
        for busy, item in self.busy:
            if busy == group:
                return item
        raise StateError(f"group {tuple(group)} has no job")

    def ready(self, stage: int) -> Iterator[int]:
        """Yield the items that a group of `stage` may take now, the first one first."""
        computed = {item for _, item in self.busy}
        waiting = [number for number, item in enumerate(self.items) if item.stage == stage and number not in computed]
        return iter(waiting[: self._free_places_after(stage)])

    def next(self) -> Assignment | None:
        """Return the next job for the first free group that can take one; None if there is none."""
        if self.status is not ScheduleStatus.RUNNING:
            return None
        for group in self.groups():
            if group in self.repairing or any(group == busy for busy, _ in self.busy):
                continue
            number = next(self.ready(group.stage), None)
            if number is not None:
                return Assignment(group, number, self.items[number].remaining)
        return None

    def started(self, assignment: Assignment) -> JobSchedule:
        """Return the schedule after the assignment of `next` was started."""
        if assignment != self.next():
            raise StateError(f"{assignment} is not the next assignment")
        return replace(self, busy=(*self.busy, (assignment.group, assignment.item)))

    def stepped(self, group: GroupId, next_step: int) -> JobSchedule:
        """Return the schedule after a group returned the state before step `next_step`."""
        number = self.item_of(group)
        item = self.items[number]
        if next_step not in range(item.next_step + 1, item.steps[item.stage].stop + 1):
            raise StateError(f"the next step of item {number} is {item.next_step}; it cannot become {next_step}")
        return self._with(number, replace(item, next_step=next_step))

    def finished(self, group: GroupId) -> JobSchedule:
        """Return the schedule after the last step of a job; the item goes to the next stage with steps for it."""
        number = self.item_of(group)
        item = self.items[number]
        if item.remaining:
            raise StateError(f"item {number} has not taken steps {item.remaining} of stage {item.stage}")
        return self._free(group)._with(number, item.entering(item.stage + 1))

    def interrupted(self, group: GroupId, *, counts_as_failure: bool) -> JobSchedule:
        """Return the schedule after a group stopped before the end of its job, and needs a repair.

        The job waits again, at its last state. `counts_as_failure` is False for a group that only needs another policy.
        """
        number = self.item_of(group)
        item = self.items[number]
        # A job whose last state has arrived is complete, even if the worker is lost before the end of its task.
        after = item if item.remaining else item.entering(item.stage + 1)
        freed = self._free(group)._with(number, after)
        return replace(freed, repairing=(*self.repairing, group), lost=self.lost + counts_as_failure)

    def repair_failed(self, group: GroupId) -> JobSchedule:
        """Return the schedule after a worker was lost during a repair."""
        self._check_repairing(group)
        return replace(self, lost=self.lost + 1)

    def repaired(self, group: GroupId) -> JobSchedule:
        """Return the schedule after a repair; the group can take jobs again."""
        self._check_repairing(group)
        return replace(self, repairing=tuple(other for other in self.repairing if other != group))

    def _free_places_after(self, stage: int) -> int:
        """Return how many more jobs of `stage` may start before the next stage must catch up."""
        if stage == self.stages - 1:
            return len(self.items)
        computed = {item for _, item in self.busy}
        waiting = sum(item.stage == stage + 1 and number not in computed for number, item in enumerate(self.items))
        started = sum(group.stage == stage for group, _ in self.busy)
        return max(0, WAITING_PER_GROUP * self.data - waiting - started)

    def _check_repairing(self, group: GroupId) -> None:
        if group not in self.repairing:
            raise StateError(f"group {tuple(group)} needs no repair")

    def _free(self, group: GroupId) -> JobSchedule:
        return replace(self, busy=tuple(pair for pair in self.busy if pair[0] != group))

    def _with(self, number: int, item: Item) -> JobSchedule:
        return replace(self, items=(*self.items[:number], item, *self.items[number + 1 :]))
