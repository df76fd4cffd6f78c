"""Scheduling loop with groups stepping on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from wanstream.distributed.driver.stage_run import (
    CallEnd,
    Inbox,
    JobEnd,
    JobEvent,
    StageRun,
)
from wanstream.distributed.messages import StepReport
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.transport.threads import run_in_thread

StepFunction = Callable[[int, int], Any]


class StepGroup:
    """`StageGroup` with a step function of item and step."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    def start(self, assignment: Assignment, inbox: Inbox) -> StepJob:
        return StepJob(self.step, assignment, inbox)

    def repair(self, inbox: Inbox) -> StepJob:
        raise AssertionError("no group has failed")


class StepJob:
    """`Job` for a `StepGroup`. Each message calls one step."""

    def __init__(self, step: StepFunction, assignment: Assignment, inbox: Inbox) -> None:
        self.run_id = f"{id(self)}"
        self.times = 0
        self._last = assignment.steps[-1]
        self._inbox = inbox
        run_in_thread("stage", self._compute, step, assignment)

    def _compute(self, step: StepFunction, assignment: Assignment) -> None:
        for number in assignment.steps:
            step(assignment.item, number)
            future: Future[int] = Future()
            future.set_result(number)
            self._inbox.put(CallEnd(run_id=self.run_id, future=future))

    def receive(self, message: StepReport | CallEnd) -> JobEvent:
        assert isinstance(message, CallEnd)
        step = message.future.result()
        end = JobEnd() if step == self._last else None
        return JobEvent(report=step, next_step=step + 1, end=end)

    def check_time(self) -> None:
        self.times += 1


def test_time_limits_are_checked_after_all_waiting_messages():
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
