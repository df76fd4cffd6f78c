"""The schedule of jobs: whatever happens in whatever order, every job is done once, and no group idles without need."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.distributed.driver.schedule import WAITING_PER_CELL, Assignment, GroupId, JobSchedule, Outcome, StageJob
from wanstream.schema import StateError


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[range]], int]:
    """(steps of each item by stage, data degree); some stages have no steps for some items."""
    stages = draw(st.integers(1, 3))
    items = []
    for _ in range(draw(st.integers(1, 7))):
        counts = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages).filter(any))
        first, steps = draw(st.integers(0, 2)), []
        for count in counts:
            steps.append(range(first, first + count))
            first += count
        items.append(steps)
    return items, draw(st.integers(1, 3))


class Played:
    """Plays groups that step, finish, are lost and mended in a random order, and checks what must hold all the time."""

    def __init__(self, schedule: JobSchedule, seed: int, *, losses: float) -> None:
        self.schedule, self.losses = schedule, losses
        self.chance = random.Random(seed)
        self.computed: list[tuple[GroupId, StageJob, int]] = []
        """(group, job, step) of every step that counts."""
        self.finished: list[StageJob] = []
        self.stands: dict[GroupId, Assignment] = {}
        self.next_step: dict[int, int] = {}

    def play(self) -> JobSchedule:
        while self.schedule.outcome is Outcome.GOING:
            self._hand_out()
            self._check_idle()
            self._advance()
        return self.schedule

    def _hand_out(self) -> None:
        while (given := self.schedule.next()) is not None:
            self.schedule = self.schedule.taken(given)
            assert given.group not in self.stands
            assert given.steps.start == self.next_step.get(given.job.item, given.steps.start)
            self.stands[given.group] = given
            self.next_step[given.job.item] = given.steps.start

    def _check_idle(self) -> None:
        for group in self.schedule.groups():
            if group in self.stands or group in self.schedule.away:
                continue
            waits = [
                number
                for number, item in enumerate(self.schedule.items)
                if item.stage == group.stage and number not in {given.job.item for given in self.stands.values()}
            ]
            behind = sum(
                item.stage == group.stage + 1 and number not in {given.job.item for given in self.stands.values()}
                for number, item in enumerate(self.schedule.items)
            )
            begun = sum(other.stage == group.stage for other in self.stands)
            is_full = group.stage + 1 < self.schedule.stages and (
                behind + begun >= WAITING_PER_CELL * self.schedule.data
            )
            assert not waits or is_full, f"{group} idles"

    def _advance(self) -> None:
        moves = [*self.stands, *self.schedule.away]
        group = self.chance.choice(moves)
        if group in self.schedule.away:
            again = self.chance.random() < self.losses
            self.schedule = self.schedule.lost_again(group) if again else self.schedule.mended(group)
            return
        given = self.stands[group]
        item, step = given.job.item, self.next_step[given.job.item]
        if self.chance.random() < self.losses:
            self._drop(group, given, step)
        elif step < given.steps.stop:
            self.schedule = self.schedule.stepped(group, step + 1)
            self.computed.append((group, given.job, step))
            self.next_step[item] = step + 1
        else:
            self._end(group, given)
            self.schedule = self.schedule.finished(group)

    def _drop(self, group: GroupId, given: Assignment, step: int) -> None:
        if step == given.steps.stop:
            self._end(group, given)
        else:
            del self.stands[group]
        self.schedule = self.schedule.dropped(group, counts=self.chance.random() < 0.8)

    def _end(self, group: GroupId, given: Assignment) -> None:
        del self.stands[group]
        self.finished.append(given.job)


def _check_all_done(items: list[list[range]], played: Played) -> None:
    jobs = {StageJob(number, stage) for number, steps in enumerate(items) for stage, each in enumerate(steps) if each}
    assert Counter(played.finished) == Counter(jobs)
    taken = Counter((job.item, step) for _, job, step in played.computed)
    assert taken == Counter((number, step) for number, steps in enumerate(items) for each in steps for step in each)
    for number, steps in enumerate(items):
        own = [step for _, job, step in played.computed if job.item == number]
        assert own == [step for each in steps for step in each], "steps in order"
    for group, job, step in played.computed:
        assert group.stage == job.stage
        assert step in items[job.item][group.stage]


@settings(max_examples=200, deadline=None)
@given(grids(), st.integers(0, 10**6))
def test_every_job_is_done_once_in_order_by_a_cell_of_its_stage(grid: tuple[list[list[range]], int], seed: int) -> None:
    items, data = grid
    played = Played(JobSchedule.of(items, data=data, max_restarts=0), seed, losses=0)
    assert played.play().outcome is Outcome.DONE
    _check_all_done(items, played)


@settings(max_examples=200, deadline=None)
@given(grids(), st.integers(0, 10**6), st.integers(0, 6))
def test_losses_cost_no_step_that_was_handed_in_and_are_counted(
    grid: tuple[list[list[range]], int], seed: int, max_restarts: int
) -> None:
    items, data = grid
    played = Played(JobSchedule.of(items, data=data, max_restarts=max_restarts), seed, losses=0.2)
    ended = played.play()
    if ended.outcome is Outcome.DONE:
        assert ended.lost <= max_restarts + 1
        _check_all_done(items, played)
    else:
        assert ended.outcome is Outcome.GIVEN_UP
        assert ended.lost == max_restarts + 1
        assert ended.next() is None


def test_a_pipeline_is_filled_and_drained_in_the_order_of_its_items() -> None:
    """Two stages of equal length and three items: the second group follows one job behind the first."""
    schedule = JobSchedule.of([[range(2), range(2, 4)]] * 3, data=1, max_restarts=0)
    rounds = []
    while schedule.outcome is Outcome.GOING:
        while (each := schedule.next()) is not None:
            schedule = schedule.taken(each)
        rounds.append({group.stage: item for group, item in schedule.busy})
        for group, item in schedule.busy:
            schedule = schedule.stepped(group, schedule.items[item].left.stop).finished(group)
    assert rounds == [{0: 0}, {0: 1, 1: 0}, {0: 2, 1: 1}, {1: 2}]


def test_a_lost_job_goes_first_to_another_cell_of_its_stage() -> None:
    schedule = JobSchedule.of([[range(4)]] * 3, data=2, max_restarts=1)
    for _ in range(2):
        each = schedule.next()
        assert each is not None
        schedule = schedule.taken(each)
    schedule = schedule.stepped(GroupId(0, 0), 3).dropped(GroupId(0, 0), counts=True)
    assert schedule.next() is None, "the other group goes on undisturbed"
    schedule = schedule.stepped(GroupId(1, 0), 4).finished(GroupId(1, 0))
    assert schedule.next() == Assignment(GroupId(1, 0), StageJob(0, 0), range(3, 4))


def test_a_fast_first_stage_waits_for_the_second() -> None:
    schedule = JobSchedule.of([[range(1), range(1, 2)]] * 20, data=1, max_restarts=0)
    begun = 0
    while (each := schedule.next()) is not None:
        schedule = schedule.taken(each)
        if each.group.stage == 0:
            begun += 1
            schedule = schedule.stepped(each.group, 1).finished(each.group)
    assert begun == WAITING_PER_CELL + 1, "one in the second stage, the others before it"


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_loss_after_the_last_state_costs_nothing(max_restarts: int) -> None:
    schedule = JobSchedule.of([[range(2)]], data=1, max_restarts=max_restarts)
    each = schedule.next()
    assert each is not None
    lost = schedule.taken(each).stepped(each.group, 2).dropped(each.group, counts=True)
    assert lost.outcome is Outcome.DONE


def test_wrong_reports_are_refused() -> None:
    new = JobSchedule.of([[range(2), range(2, 4)]], data=1, max_restarts=1)
    first, second = GroupId(0, 0), GroupId(0, 1)
    given = new.next()
    assert given is not None
    going = new.taken(given)
    for wrong in (
        lambda: new.taken(Assignment(second, StageJob(0, 1), range(2, 4))),
        lambda: going.taken(given),
        lambda: new.stepped(first, 1),
        lambda: going.stepped(first, 0),
        lambda: going.stepped(first, 3),
        lambda: going.stepped(second, 1),
        lambda: going.finished(first),
        lambda: new.dropped(first, counts=True),
        lambda: going.mended(first),
        lambda: going.lost_again(first),
    ):
        with pytest.raises(StateError):
            wrong()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "at least one item"),
        ([[range(2)], [range(1), range(1, 2)]], "as many stages"),
        ([[range(0), range(0)]], "item 0 has no steps"),
        ([[range(2), range(3, 4)]], "gaps"),
    ],
)
def test_what_cannot_be_scheduled_is_named(steps: list[list[range]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JobSchedule.of(steps, data=1, max_restarts=0)
