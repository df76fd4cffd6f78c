"""Scheduling loop with groups stepping on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from wanstream.distributed.driver.stage_run import (
    CallEnd,
    Inbox,
    JobEnd,
    JobEvent,
    RestartLimitError,
    StageRun,
)
from wanstream.distributed.messages import StepReport
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.sampling.steps import SamplingCancelled

StepFunction = Callable[[int, int], Any]


class StepGroup:
    """`StageGroup` with a step function of item and step."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    def start(self, assignment: Assignment, inbox: Inbox) -> StepJob:
        return StepJob(self.step, assignment, inbox)

    def repair(self, inbox: Inbox) -> StepJob:
        return StepJob(self.step, None, inbox)


class StepJob:
    """`Job` for a `StepGroup`, empty for a repair. Each message calls one step."""

    def __init__(self, step: StepFunction, assignment: Assignment | None, inbox: Inbox) -> None:
        self.run_id = f"{id(self)}"
        self.times = 0
        self.stopped = threading.Event()
        self._last = assignment and assignment.steps[-1]
        self._inbox = inbox
        run_in_thread("stage", self._compute, step, assignment)

    def _compute(self, step: StepFunction, assignment: Assignment | None) -> None:
        if assignment is None:
            self._call(lambda: None)
            return
        for number in assignment.steps:
            if not self._call(self._take, step, assignment.item, number):
                break

    def _take(self, step: StepFunction, item: int, number: int) -> int:
        if self.stopped.is_set():
            raise SamplingCancelled(number, 0)
        step(item, number)
        return number

    def _call(self, function: Callable[..., Any], *args: Any) -> bool:
        future = run_in_thread("step", function, *args)
        error = future.exception()
        self._inbox.put(CallEnd(run_id=self.run_id, future=future))
        return error is None

    def receive(self, message: StepReport | CallEnd) -> JobEvent:
        assert isinstance(message, CallEnd)
        error = message.future.exception()
        if error is not None:
            return JobEvent(end=JobEnd.of(error))
        step = message.future.result()
        if step is None:
            return JobEvent(end=JobEnd())
        return JobEvent(
            report=step, next_step=step + 1, end=JobEnd() if step == self._last else None
        )

    def check_time(self) -> None:
        self.times += 1

    def stop(self) -> None:
        self.stopped.set()


def run_stages(
    steps: list[list[range]],
    groups: dict[GroupId, StepFunction],
    *,
    max_restarts: int = 0,
    on_report: Callable[[int, int], None] = lambda item, step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    made = {group: StepGroup(step) for group, step in groups.items()}
    StageRun(steps, made, max_restarts=max_restarts).run(on_report, should_stop)


@pytest.mark.parametrize("data", [1, 2])
def test_every_item_passes_all_stages_in_order_and_is_reported_once_per_step(data: int) -> None:
    stages, taken, reported = (
        [range(3), range(3, 7)],
        dict[GroupId, list[int]](),
        list[tuple[int, int]](),
    )

    def stepping(group: GroupId) -> StepFunction:
        return lambda item, step: taken.setdefault(group, []).append(step)

    groups = {
        group: stepping(group)
        for group in (GroupId(place, stage) for place in range(data) for stage in (0, 1))
    }
    run_stages([stages] * 5, groups, on_report=lambda item, step: reported.append((item, step)))
    for item in range(5):
        assert [step for each, step in reported if each == item] == [*range(7)]
    for group, steps in taken.items():
        assert set(steps) <= set(stages[group.stage])


def test_items_overlap_in_the_stages() -> None:
    """The first stage's second item and the second stage's first one end only together."""
    together = threading.Barrier(2, timeout=20)

    def first(item: int, step: int) -> None:
        if item == 1:
            together.wait()

    def second(item: int, step: int) -> None:
        if item == 0:
            together.wait()

    run_stages([[range(1), range(1, 2)]] * 2, {GroupId(0, 0): first, GroupId(0, 1): second})


def test_a_lost_step_is_taken_again_until_one_loss_too_many() -> None:
    taken: list[int] = []

    def step(item: int, step: int) -> None:
        taken.append(step)
        if taken.count(4) < 3 and step == 4:
            raise WorkerLostError("gone, and its log says why", 0)

    run_stages([[range(6)]], {GroupId(0, 0): step}, max_restarts=2)
    assert taken == [0, 1, 2, 3, 4, 4, 4, 5]
    taken.clear()
    with pytest.raises(
        RestartLimitError, match="its log says why\ngiving up after 1 worker restarts"
    ):
        run_stages([[range(6)]], {GroupId(0, 0): step}, max_restarts=1)


@pytest.mark.parametrize("where", ["step", "report"])
def test_an_error_ends_the_run_and_leaves_no_job(where: str) -> None:
    taken: list[int] = []

    def step(item: int, step: int) -> None:
        taken.append(step)
        if where == "step" and step == 5:
            raise ArithmeticError("NaN")

    def on_report(item: int, step: int) -> None:
        if where == "report" and step == 3:
            raise ArithmeticError("NaN")

    groups = {GroupId(0, 0): step, GroupId(1, 0): lambda item, step: None}
    with pytest.raises(ArithmeticError, match="NaN"):
        run_stages([[range(2000)]] * 4, groups, on_report=on_report)
    before = len(taken)
    run_stages([[range(3)]] * 2, groups)
    assert len(taken) <= before + 6


def test_a_stop_ends_all_jobs_after_the_step() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def step(item: int, step: int) -> None:
        begun.set()
        assert go_on.wait(20)

    def should_stop() -> bool:
        if begun.is_set():
            go_on.set()
        return begun.is_set()

    with pytest.raises(SamplingCancelled) as stopped:
        run_stages([[range(1000)]] * 2, {GroupId(0, 0): step}, should_stop=should_stop)
    assert (stopped.value.step, stopped.value.block) == (1, 0)


def test_time_limits_are_checked_after_all_messages_that_wait_and_strange_ones_are_dropped() -> (
    None
):
    """Reports left waiting by a busy loop count as signs of life.

    Reports from an ended job must not reach the next one.
    """
    go_on, checks = threading.Event(), list[int]()

    class Waiting(StepGroup):
        def start(self, assignment: Assignment, inbox: Inbox) -> StepJob:
            job = super().start(assignment, inbox)
            while inbox.qsize() < 3:
                threading.Event().wait(0.001)
            inbox.put(StepReport(run_id="another", place=0, record=None))  # type: ignore[arg-type]
            self.job = job
            go_on.set()
            return job

    group = Waiting(lambda item, step: step < 3 or go_on.wait(20))
    run = StageRun([[range(3)]], {GroupId(0, 0): group})
    run.run(lambda item, step: checks.append(group.job.times))
    assert checks == [0, 0, 0]
