"""Schedule of jobs: which group computes which steps of which video next. Nothing here computes or waits.

A *job* is one stage of one item (a video, several in one pass, or a tile). An item goes through its stages in order.
A group takes jobs of one stage only, so that no worker ever changes its expert if the stages are cut at the switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ...schema import StateError

RESTARTS_WITHIN_S = 3600.0
"""Period in which a group is restarted `max_restarts` times at most. One that is lost more often has a lasting cause;
rarer losses do not end a run, however long it is."""
WAITING_PER_GROUP = 4
"""Largest number of items that wait before a stage, for each of its groups. Their states are in RAM."""


class GroupId(NamedTuple):
    """Data and stage coordinates of a group of workers."""

    data: int
    stage: int


@dataclass(kw_only=True)
class Item:
    """Progress of one item."""

    steps: Sequence[range]
    """Steps of each stage. An item skips stages without steps."""
    stage: int = 0
    """Current or next stage; the number of stages when the item is done."""
    next_step: int = 0
    """First step that the last state does not include."""

    @property
    def is_done(self) -> bool:
        return self.stage == len(self.steps)

    @property
    def remaining(self) -> range:
        """Steps of the current stage that were not taken yet."""
        return range(self.next_step, self.steps[self.stage].stop)

    def enter(self, stage: int) -> None:
        """Go to the first stage, from `stage` on, that has steps for this item."""
        while stage < len(self.steps) and not self.steps[stage]:
            stage += 1
        self.stage = stage
        if not self.is_done:
            self.next_step = self.steps[stage].start


class Assignment(NamedTuple):
    """Next job of a free group: steps of the group's stage of an item."""

    group: GroupId
    item: int
    steps: range


class JobSchedule:
    """State of all items and groups. An illegal transition raises StateError and changes nothing.

    Args:
        steps: steps of each item, by stage.
        groups: all groups in the order of their ranks, as many for each stage.
        max_restarts: number of losses of a group that are repaired within `RESTARTS_WITHIN_S`.
        ahead: how many places after the first item that is not done an item may be started.

    Raises:
        ValueError: no items, no item with steps, or gaps between the stages of an item.
    """

    def __init__(
        self, steps: Sequence[Sequence[range]], groups: Sequence[GroupId], *, max_restarts: int, ahead: int
    ) -> None:
        if not steps or len({len(stages) for stages in steps}) != 1 or not steps[0]:
            raise ValueError("nothing to schedule: give at least one item, and as many stages for each of them")
        if not any(each for stages in steps for each in stages):
            raise ValueError("nothing to schedule: no item has steps")
        for number, stages in enumerate(steps):
            taken = [each for each in stages if each]
            if any(before.stop != after.start for before, after in pairwise(taken)):
                raise ValueError(f"the stages of item {number} have gaps between their steps: {taken}")
        self.items = [Item(steps=stages) for stages in steps]
        for item in self.items:
            item.enter(0)
        self.groups, self.stages, self.max_restarts, self.ahead = groups, len(steps[0]), max_restarts, ahead
        self.busy: dict[GroupId, int] = {}
        """Item of each group that computes a job."""
        self.repairing: set[GroupId] = set()
        """Groups that get no jobs until their repair has ended."""
        self.lost = 0
        """Number of losses so far."""
        self._losses: dict[GroupId, list[float]] = {}
        """Times of the losses of each group within the last `RESTARTS_WITHIN_S`."""

    @property
    def is_done(self) -> bool:
        return all(item.is_done for item in self.items)

    @property
    def is_running(self) -> bool:
        """False when all items are done, and after more losses of a group than `max_restarts`."""
        return not self.is_done and all(len(times) <= self.max_restarts for times in self._losses.values())

    def next(self) -> Assignment | None:
        """Return the next job for the first free group that can take one; None if there is none."""
        if not self.is_running:
            return None
        for group in self.groups:
            if group in self.repairing or group in self.busy or self._is_full_after(group.stage):
                continue
            if waiting := self._waiting(group.stage):
                return Assignment(group, waiting[0], self.items[waiting[0]].remaining)
        return None

    def start(self, assignment: Assignment) -> None:
        """Record the start of the assignment that `next` returned."""
        if assignment != self.next():
            raise StateError(f"{assignment} is not the next assignment")
        self.busy[assignment.group] = assignment.item

    def step(self, group: GroupId, next_step: int) -> None:
        """Record the state before step `next_step`, which a group returned."""
        item = self._item_of(group)
        if next_step not in range(item.next_step + 1, item.steps[item.stage].stop + 1):
            number = self.busy[group]
            raise StateError(f"the next step of item {number} is {item.next_step}; it cannot become {next_step}")
        item.next_step = next_step

    def finish(self, group: GroupId) -> None:
        """Record the end of a repair, or of a job; its item goes to the next stage with steps for it."""
        if group in self.repairing:
            self.repairing.remove(group)
            return
        item = self._item_of(group)
        if item.remaining:
            raise StateError(f"item {self.busy[group]} has not taken steps {item.remaining} of stage {item.stage}")
        del self.busy[group]
        item.enter(item.stage + 1)

    def interrupt(self, group: GroupId, *, counts_as_failure: bool, now_s: float) -> None:
        """Record a group that stopped before the end of its job, or whose repair failed, and that needs a repair.

        The job waits again, at its last state. `counts_as_failure` is False for a group that only needs another policy.
        """
        if group not in self.repairing:
            item = self._item_of(group)
            del self.busy[group]
            self.repairing.add(group)
            # A job whose last state has arrived is complete, even if the worker is lost before the end of its task.
            if not item.remaining:
                item.enter(item.stage + 1)
        if counts_as_failure:
            self.lost += 1
            recent = [each for each in self._losses.get(group, ()) if now_s - each < RESTARTS_WITHIN_S]
            self._losses[group] = [*recent, now_s]

    def _item_of(self, group: GroupId) -> Item:
        if group not in self.busy:
            raise StateError(f"group {tuple(group)} has no job")
        return self.items[self.busy[group]]

    def _waiting(self, stage: int) -> list[int]:
        """Return the items that wait for a group of `stage` and may be started, the first one first."""
        first = next(number for number, item in enumerate(self.items) if not item.is_done)
        near, computed = self.items[: first + self.ahead + 1], set(self.busy.values())
        return [number for number, item in enumerate(near) if item.stage == stage and number not in computed]

    def _is_full_after(self, stage: int) -> bool:
        """Return True if no more jobs of `stage` may start before the next stage has caught up."""
        if stage == self.stages - 1:
            return False
        started = sum(group.stage == stage for group in self.busy)
        return len(self._waiting(stage + 1)) + started >= WAITING_PER_GROUP * len(self.groups) // self.stages
