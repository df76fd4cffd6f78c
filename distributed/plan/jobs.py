"""Job schedule: the next steps and video for each group.

Nothing here computes or waits.

A *job* is one stage for one item: a video, several videos in one pass, or a tile. Items go through
the stages in order. A group takes jobs from one stage only. If the stages are cut at the switch, no
worker ever changes the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ...schema import StateError

RESTARTS_WITHIN_S = 3600.0
"""Period in which a group is restarted `max_restarts` times at most. More frequent losses have a
lasting cause. Rarer ones do not end a run, however long it is."""
WAITING_PER_GROUP = 4
"""Most items waiting before a stage, per group. Their states are in RAM."""


class GroupId(NamedTuple):
    """Data and stage coordinates of a worker group."""

    data: int
    stage: int


@dataclass(kw_only=True)
class Item:
    """Progress of one item."""

    steps: Sequence[range]
    """Steps by stage. An item skips stages without steps."""
    stage: int = 0
    """Current or next stage; the number of stages when the item is done."""
    next_step: int = 0
    """First step after the last state."""

    @property
    def is_done(self) -> bool:
        return self.stage == len(self.steps)

    @property
    def remaining(self) -> range:
        """Remaining steps in the current stage."""
        return range(self.next_step, self.steps[self.stage].stop)

    def enter(self, stage: int) -> None:
        """Go to the first stage with steps for this item, from `stage` on."""
        while stage < len(self.steps) and not self.steps[stage]:
            stage += 1
        self.stage = stage
        if not self.is_done:
            self.next_step = self.steps[stage].start


class Assignment(NamedTuple):
    """Next job for a free group: steps in the group's stage for one item."""

    group: GroupId
    item: int
    steps: range


class JobSchedule:
    """State of all items and groups. An illegal transition raises StateError and changes nothing.

    Args:
        steps: steps of each item, by stage.
        groups: all groups in rank order, equally many for each stage.
        max_restarts: repairs per group within `RESTARTS_WITHIN_S`.
        ahead: an item may start at most this many places after the first unfinished one.

    Raises:
        ValueError: no items, no item with steps, or gaps between the stages of an item.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[range]],
        groups: Sequence[GroupId],
        *,
        max_restarts: int,
        ahead: int,
    ) -> None:
        if not steps or len({len(stages) for stages in steps}) != 1 or not steps[0]:
            raise ValueError(
                "nothing to schedule: give at least one item, and as many stages for each of them"
            )
        if not any(each for stages in steps for each in stages):
            raise ValueError("nothing to schedule: no item has steps")
        for number, stages in enumerate(steps):
            taken = [each for each in stages if each]
            if any(before.stop != after.start for before, after in pairwise(taken)):
                raise ValueError(
                    f"the stages of item {number} have gaps between their steps: {taken}"
                )
        self.items = [Item(steps=stages) for stages in steps]
        for item in self.items:
            item.enter(0)
        self.groups = groups
        self.stages = len(steps[0])
        self.max_restarts = max_restarts
        self.ahead = ahead
        self.busy: dict[GroupId, int] = {}
        """Current item of each busy group."""
        self.repairing: set[GroupId] = set()
        """Groups under repair, which get no jobs."""
        self.lost = 0
        """Number of losses so far."""
        self._losses: dict[GroupId, list[float]] = {}
        """Loss times of each group within the last `RESTARTS_WITHIN_S`."""

    @property
    def is_done(self) -> bool:
        return all(item.is_done for item in self.items)

    @property
    def is_running(self) -> bool:
        """False when all items are done, and after too many losses of one group."""
        return not self.is_done and all(
            len(times) <= self.max_restarts for times in self._losses.values()
        )

    def next(self) -> Assignment | None:
        """Return the next job, for the first free group that can take one; None without a job."""
        if not self.is_running:
            return None
        for group in self.groups:
            if group in self.repairing or group in self.busy or self._is_full_after(group.stage):
                continue
            if waiting := self._waiting(group.stage):
                return Assignment(group, waiting[0], self.items[waiting[0]].remaining)
        return None

    def start(self, assignment: Assignment) -> None:
        """Record the start of the job that `next` returned."""
        if assignment != self.next():
            raise StateError(f"{assignment} is not the next assignment")
        self.busy[assignment.group] = assignment.item

    def step(self, group: GroupId, next_step: int) -> None:
        """Record the state before step `next_step`, returned by a group."""
        item = self._item_of(group)
        if next_step not in range(item.next_step + 1, item.steps[item.stage].stop + 1):
            number = self.busy[group]
            raise StateError(
                f"the next step of item {number} is {item.next_step}; it cannot become {next_step}"
            )
        item.next_step = next_step

    def finish(self, group: GroupId) -> None:
        """Record the end of a repair, or of a job.

        The item goes to the next stage with steps.
        """
        if group in self.repairing:
            self.repairing.remove(group)
            return
        item = self._item_of(group)
        if item.remaining:
            raise StateError(
                f"item {self.busy[group]} has not taken steps {item.remaining} of stage "
                f"{item.stage}"
            )
        del self.busy[group]
        item.enter(item.stage + 1)

    def interrupt(self, group: GroupId, *, counts_as_failure: bool, now_s: float) -> None:
        """Record a group in need of a repair: the job stopped early, or the repair failed.

        The job waits again, at the last state. `counts_as_failure` is False if the group only needs
        another policy.
        """
        if group not in self.repairing:
            item = self._item_of(group)
            del self.busy[group]
            self.repairing.add(group)
            # A job is complete once the last state has arrived, even if the worker is lost before
            # the task ends.
            if not item.remaining:
                item.enter(item.stage + 1)
        if counts_as_failure:
            self.lost += 1
            recent = [
                each for each in self._losses.get(group, ()) if now_s - each < RESTARTS_WITHIN_S
            ]
            self._losses[group] = [*recent, now_s]

    def _item_of(self, group: GroupId) -> Item:
        if group not in self.busy:
            raise StateError(f"group {tuple(group)} has no job")
        return self.items[self.busy[group]]

    def _waiting(self, stage: int) -> list[int]:
        """Return the waiting items for `stage` that may start, first one first."""
        first = next(number for number, item in enumerate(self.items) if not item.is_done)
        near = self.items[: first + self.ahead + 1]
        computed = set(self.busy.values())
        return [
            number
            for number, item in enumerate(near)
            if item.stage == stage and number not in computed
        ]

    def _is_full_after(self, stage: int) -> bool:
        """Return True if `stage` may start no more jobs before the next stage has caught up."""
        if stage == self.stages - 1:
            return False
        # Each running job adds a waiting item when it ends.
        started = sum(group.stage == stage for group in self.busy)
        most = WAITING_PER_GROUP * len(self.groups) // self.stages
        return len(self._waiting(stage + 1)) + started >= most
