"""Job schedule under random events: each job is done once, no group idles without need."""

import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.distributed.plan.jobs import WAITING_PER_GROUP, Assignment, GroupId, JobSchedule
from wanstream.schema import StateError


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[range]], int]:
    """Draw steps by item and stage, and a data degree. A stage may have no step for an item."""
    stages = draw(st.integers(1, 3))
    items = []
    for _ in range(draw(st.integers(1, 7))):
        counts = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages).filter(any))
        first = draw(st.integers(0, 2))
        steps = []
        for count in counts:
            steps.append(range(first, first + count))
            first += count
        items.append(steps)
    return items, draw(st.integers(1, 3))


def schedule_of(items, data=1, max_restarts=0, ahead=sys.maxsize):
    stages = len(items[0]) if items else 1
    groups = [GroupId(row, stage) for row in range(data) for stage in range(stages)]
    return JobSchedule(items, groups, max_restarts=max_restarts, ahead=ahead)


class Simulation:
    """Groups that step, finish, fail and are repaired in random order, with invariants checked."""

    def __init__(self, schedule: JobSchedule, seed: int, *, losses: float) -> None:
        self.schedule = schedule
        self.losses = losses
        self.chance = random.Random(seed)
        self.computed: list[tuple[GroupId, int, int]] = []
        """(group, item, step) for every step."""
        self.finished: list[tuple[int, int]] = []
        """(item, stage) for every job."""
        self.stands: dict[GroupId, Assignment] = {}
        self.next_step: dict[int, int] = {}
        self.lost = Counter[GroupId]()

    def play(self) -> JobSchedule:
        while self.schedule.is_running:
            self._hand_out()
            self._check_idle()
            self._advance()
        return self.schedule

    def _hand_out(self) -> None:
        while (assignment := self.schedule.next()) is not None:
            self.schedule.start(assignment)
            assert assignment.group not in self.stands
            assert assignment.item <= self._furthest()
            start = assignment.steps.start
            assert self.next_step.setdefault(assignment.item, start) == start
            self.stands[assignment.group] = assignment

    def _furthest(self) -> int:
        return self.schedule.ahead + [item.is_done for item in self.schedule.items].index(False)

    def _ready(self, stage: int) -> list[int]:
        """Return the items that wait for this stage."""
        computed = {assignment.item for assignment in self.stands.values()}
        within = enumerate(self.schedule.items[: self._furthest() + 1])
        return [at for at, item in within if item.stage == stage and at not in computed]

    def _check_idle(self) -> None:
        data = len(self.schedule.groups) // self.schedule.stages
        for group in self.schedule.groups:
            if group in self.stands or group in self.schedule.repairing:
                continue
            begun = sum(other.stage == group.stage for other in self.stands)
            behind = len(self._ready(group.stage + 1)) + begun
            is_last = group.stage + 1 == self.schedule.stages
            is_full = not is_last and behind >= WAITING_PER_GROUP * data
            assert is_full or not self._ready(group.stage), f"{group} idles"

    def _advance(self) -> None:
        group = self.chance.choice([*self.stands, *self.schedule.repairing])
        if group in self.schedule.repairing:
            if self.chance.random() < self.losses:
                self._lose(group)
            else:
                self.schedule.finish(group)
            return
        assignment = self.stands[group]
        item = assignment.item
        step = self.next_step[assignment.item]
        if self.chance.random() < self.losses:
            self._drop(group, assignment, step)
        elif step < assignment.steps.stop:
            self.schedule.step(group, step + 1)
            self.computed.append((group, item, step))
            self.next_step[item] = step + 1
        else:
            self._end(group, assignment)
            self.schedule.finish(group)

    def _drop(self, group: GroupId, assignment: Assignment, step: int) -> None:
        if step == assignment.steps.stop:
            self._end(group, assignment)
        else:
            del self.stands[group]
        if self.chance.random() < 0.8:
            self._lose(group)
        else:
            self.schedule.interrupt(group, counts_as_failure=False, now_s=0.0)

    def _lose(self, group: GroupId) -> None:
        self.lost[group] += 1
        self.schedule.interrupt(group, counts_as_failure=True, now_s=0.0)

    def _end(self, group: GroupId, assignment: Assignment) -> None:
        del self.stands[group]
        self.finished.append((assignment.item, group.stage))


AHEAD = st.sampled_from([0, 1, 2, sys.maxsize])


def _check_all_done(items: list[list[range]], played: Simulation) -> None:
    jobs = [(n, stage) for n, steps in enumerate(items) for stage, each in enumerate(steps) if each]
    assert Counter(played.finished) == Counter(jobs)
    for number, steps in enumerate(items):
        taken = [(group.stage, step) for group, item, step in played.computed if item == number]
        wanted = [(stage, step) for stage, each in enumerate(steps) for step in each]
        assert taken == wanted, "each step once, in order and in its stage"


@settings(max_examples=80, deadline=None)
@given(grids(), st.integers(0, 10**6), AHEAD)
def test_every_job_is_done_once_in_order_by_a_group_of_its_stage(grid, seed, ahead):
    items, data = grid
    played = Simulation(schedule_of(items, data=data, ahead=ahead), seed, losses=0)
    assert played.play().is_done
    _check_all_done(items, played)


@settings(max_examples=80, deadline=None)
@given(grids(), st.integers(0, 10**6), st.integers(0, 6), AHEAD)
def test_losses_cost_no_reported_step_and_are_counted(grid, seed, max_restarts, ahead):
    items, data = grid
    played = Simulation(schedule_of(items, data, max_restarts, ahead), seed, losses=0.2)
    ended = played.play()
    assert ended.lost == played.lost.total()
    if ended.is_done:
        assert max(played.lost.values(), default=0) <= max_restarts + 1
        _check_all_done(items, played)
    else:
        assert not ended.is_running
        assert max(played.lost.values()) == max_restarts + 1
        assert ended.next() is None


HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("losses", "given_up_after"),
    [
        ([(0, 0.0), (0, 1.0), (0, 2.0)], 3),
        ([(0, 0.0), (1, 1.0), (0, 2.0), (1, 3.0)], None),
        ([(0, 0.0), (1, 1.0), (0, 2.0), (1, 3.0), (1, 4.0)], 5),
        # The first ones are more than an hour old.
        ([(0, 0.0), (0, 100.0), (0, HOUR_S + 50.0), (0, HOUR_S + 60.0)], 4),
        ([(0, 0.0), (0, 100.0), (0, HOUR_S), (0, HOUR_S + 100.0), (0, 2 * HOUR_S)], None),
        ([(0, number * (HOUR_S / 2 + 1)) for number in range(50)], None),
        ([(0, number * (HOUR_S / 2 - 1)) for number in range(50)], 3),
    ],
)
def test_two_restarts_of_each_group_within_an_hour(losses, given_up_after):
    schedule = schedule_of([[range(4)]] * 2, data=2, max_restarts=2)
    for number, (data, now_s) in enumerate(losses, 1):
        while (each := schedule.next()) is not None:
            schedule.start(each)
        schedule.interrupt(GroupId(data, 0), counts_as_failure=True, now_s=now_s)
        schedule.finish(GroupId(data, 0))
        assert schedule.is_running == (number != given_up_after), number
        if not schedule.is_running:
            break
    assert schedule.lost == (given_up_after or len(losses))


def test_a_lost_job_goes_first_to_another_group_of_its_stage():
    schedule = schedule_of([[range(4)]] * 3, data=2, max_restarts=1)
    for _ in range(2):
        schedule.start(schedule.next())
    schedule.step(GroupId(0, 0), 3)
    schedule.interrupt(GroupId(0, 0), counts_as_failure=True, now_s=0.0)
    assert schedule.next() is None, "the other group goes on undisturbed"
    schedule.step(GroupId(1, 0), 4)
    schedule.finish(GroupId(1, 0))
    assert schedule.next() == Assignment(GroupId(1, 0), 0, range(3, 4))


def test_a_fast_first_stage_waits_for_the_second():
    schedule = schedule_of([[range(1), range(1, 2)]] * 20)
    begun = 0
    while (each := schedule.next()) is not None:
        schedule.start(each)
        if each.group.stage == 0:
            begun += 1
            schedule.step(each.group, 1)
            schedule.finish(each.group)
    assert begun == WAITING_PER_GROUP + 1, "one in the second stage, the others before it"


def test_illegal_transitions_are_refused():
    new, going = (schedule_of([[range(2), range(2, 4)]], max_restarts=1) for _ in range(2))
    first = GroupId(0, 0)
    second = GroupId(0, 1)
    assignment = going.next()
    going.start(assignment)
    for wrong in (
        lambda: new.start(Assignment(second, 0, range(2, 4))),
        lambda: going.start(assignment),
        lambda: new.step(first, 1),
        lambda: going.step(first, 0),
        lambda: going.step(first, 3),
        lambda: going.step(second, 1),
        lambda: new.finish(first),
        lambda: going.finish(first),
        lambda: going.finish(second),
        lambda: new.interrupt(first, counts_as_failure=True, now_s=0.0),
    ):
        with pytest.raises(StateError):
            wrong()
    assert (new.busy, new.lost, going.busy, going.items[0].next_step) == ({}, 0, {first: 0}, 0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "at least one item"),
        ([[range(2)], [range(1), range(1, 2)]], "as many stages"),
        ([[range(0), range(0)]], "no item has steps"),
        ([[range(2), range(3, 4)]], "gaps"),
    ],
)
def test_items_that_cannot_be_scheduled_are_named(steps, words):
    with pytest.raises(ValueError, match=words):
        schedule_of(steps)
