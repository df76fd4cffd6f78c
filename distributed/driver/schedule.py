"""Which group computes which steps of which video next. Values in, values out: nothing here computes, waits or knows
what a step is.

A *job* is one stage of one item (a video, or several in one pass). An item goes through its stages in order; a group
takes jobs of its own stage only, so that with the cut at the expert switch no worker ever changes its expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from ...schema import StateError

WAITING_PER_CELL = 4
"""How many items may wait before a stage for each of its groups: their states lie in RAM."""


class StageJob(NamedTuple):
    """The steps of one stage of one item."""

    item: int
    stage: int


class GroupId(NamedTuple):
    """Workers that compute together, by their place in the mesh."""

    data: int
    stage: int


class Outcome(Enum):
    """How a schedule stands; the value completes the sentence "this run ..."."""

    GOING = "is going on"
    DONE = "is done"
    GIVEN_UP = "was given up: more was lost than may be replaced"


@dataclass(frozen=True, kw_only=True)
class Item:
    """How far an item is."""

    steps: tuple[range, ...]
    """Of each stage; one that is empty is passed over."""
    stage: int
    """The one that computes it, or will next; as many as there are stages when it is done."""
    next_step: int
    """Where its last state stands."""

    @property
    def is_done(self) -> bool:
        return self.stage == len(self.steps)

    @property
    def left(self) -> range:
        """The steps of its present stage that are still to be taken."""
        return range(self.next_step, self.steps[self.stage].stop)

    def entering(self, stage: int) -> Item:
        """The same before the first stage from `stage` on that has steps for it."""
        while stage < len(self.steps) and not self.steps[stage]:
            stage += 1
        first = self.next_step if stage == len(self.steps) else self.steps[stage].start
        return replace(self, stage=stage, next_step=first)


class Assignment(NamedTuple):
    """What a free group is to do next."""

    group: GroupId
    job: StageJob
    steps: range


@dataclass(frozen=True, kw_only=True)
class JobSchedule:
    """All items and all groups at one moment. Every report gives another schedule; a wrong one raises ScheduleError."""

    items: tuple[Item, ...]
    data: int
    """How many groups each stage has."""
    stages: int
    busy: tuple[tuple[GroupId, int], ...] = ()
    """(group, item) of what is computed now."""
    away: tuple[GroupId, ...] = ()
    """Groups that have lost a worker and are not mended yet."""
    lost: int = 0
    """Losses so far."""
    max_restarts: int
    """Losses that are made good."""

    @classmethod
    def of(cls, steps: Sequence[Sequence[range]], *, data: int, max_restarts: int) -> JobSchedule:
        """Before the first job; `steps` are those of each item, by stage. Raises ValueError for ranges with gaps."""
        if not steps or len({len(stages) for stages in steps}) != 1 or not steps[0]:
            raise ValueError("nothing to schedule: give at least one item, and as many stages for each of them")
        for number, stages in enumerate(steps):
            taken = [each for each in stages if each]
            if not taken:
                raise ValueError(f"item {number} has no steps: leave it out")
            if any(before.stop != after.start for before, after in pairwise(taken)):
                raise ValueError(f"the stages of item {number} have gaps between their steps: {taken}")
        items = tuple(Item(steps=tuple(stages), stage=0, next_step=0).entering(0) for stages in steps)
        return cls(items=items, data=data, stages=len(steps[0]), max_restarts=max_restarts)

    @property
    def outcome(self) -> Outcome:
        if all(item.is_done for item in self.items):
            return Outcome.DONE
        return Outcome.GIVEN_UP if self.lost > self.max_restarts else Outcome.GOING

    def groups(self) -> Iterator[GroupId]:
        """All groups, in the order of their ranks."""
        return (GroupId(data, stage) for data in range(self.data) for stage in range(self.stages))

    def item_of(self, group: GroupId) -> int:
        """The item that a busy group computes."""
        for busy, item in self.busy:
            if busy == group:
                return item
        raise StateError(f"group {tuple(group)} computes nothing")

    def ready(self, stage: int) -> Iterator[int]:
        """Items that a group of `stage` may take now, in the order in which it should."""
        computed = {item for _, item in self.busy}
        waiting = [number for number, item in enumerate(self.items) if item.stage == stage and number not in computed]
        return iter(waiting[: self._room_behind(stage)])

    def next(self) -> Assignment | None:
        """What the first free group that has something to do is to do; None where there is none."""
        if self.outcome is not Outcome.GOING:
            return None
        for group in self.groups():
            if group in self.away or any(group == busy for busy, _ in self.busy):
                continue
            number = next(self.ready(group.stage), None)
            if number is not None:
                return Assignment(group, StageJob(number, group.stage), self.items[number].left)
        return None

    def taken(self, given: Assignment) -> JobSchedule:
        """What `next` gave has begun."""
        if given != self.next():
            raise StateError(f"{given} is not what is to be done next")
        return replace(self, busy=(*self.busy, (given.group, given.job.item)))

    def stepped(self, group: GroupId, next_step: int) -> JobSchedule:
        """A group has handed in the state before step `next_step`."""
        number = self.item_of(group)
        item = self.items[number]
        if next_step not in range(item.next_step + 1, item.steps[item.stage].stop + 1):
            raise StateError(f"item {number} is before step {item.next_step}; it cannot stand at {next_step} next")
        return self._with(number, replace(item, next_step=next_step))

    def finished(self, group: GroupId) -> JobSchedule:
        """A group has taken the last step of its job; the item goes to the next stage that has steps for it."""
        number = self.item_of(group)
        item = self.items[number]
        if item.left:
            raise StateError(f"item {number} still has steps {item.left} in stage {item.stage}")
        return self._free(group)._with(number, item.entering(item.stage + 1))

    def dropped(self, group: GroupId, *, counts: bool) -> JobSchedule:
        """A group could not go on: its job waits again, where its last state stands; the group is away until `mended`.

        `counts` tells a loss from a group that only wants to go on in another way.
        """
        number = self.item_of(group)
        item = self.items[number]
        # Lost between its last state and the word that it is over, a job is over all the same.
        after = item if item.left else item.entering(item.stage + 1)
        return replace(self._free(group)._with(number, after), away=(*self.away, group), lost=self.lost + counts)

    def lost_again(self, group: GroupId) -> JobSchedule:
        """A group that was to be mended has lost a worker once more."""
        self._check_away(group)
        return replace(self, lost=self.lost + 1)

    def mended(self, group: GroupId) -> JobSchedule:
        """A group that was away can be given jobs again."""
        self._check_away(group)
        return replace(self, away=tuple(other for other in self.away if other != group))

    def _room_behind(self, stage: int) -> int:
        """How many more jobs of `stage` may be begun before the next stage must catch up."""
        if stage == self.stages - 1:
            return len(self.items)
        computed = {item for _, item in self.busy}
        waiting = sum(item.stage == stage + 1 and number not in computed for number, item in enumerate(self.items))
        begun = sum(group.stage == stage for group, _ in self.busy)
        return max(0, WAITING_PER_CELL * self.data - waiting - begun)

    def _check_away(self, group: GroupId) -> None:
        if group not in self.away:
            raise StateError(f"group {tuple(group)} was not lost")

    def _free(self, group: GroupId) -> JobSchedule:
        return replace(self, busy=tuple(pair for pair in self.busy if pair[0] != group))

    def _with(self, number: int, item: Item) -> JobSchedule:
        return replace(self, items=(*self.items[:number], item, *self.items[number + 1 :]))
