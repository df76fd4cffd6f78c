"""A task on the workers of a group: how it ends, and whether they may take another one as they are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from wanstream.distributed.driver.heartbeat import Heartbeat, silence_limit
from wanstream.distributed.driver.task_run import TaskEnd, TaskRun, TaskVerdict
from wanstream.distributed.messages import RunTask, StepReport, TaskResult
from wanstream.distributed.worker.errors import PeerLostError, WorkerTimeoutError
from wanstream.sampling import SamplingCancelled, SmallerPolicyError
from wanstream.schema import OffloadPolicy, StepRecord, Timeline

ENDED = TaskResult(run_id="", rank=0, timeline=Timeline(kind="measured", steps=()), latents=None, sigma=0.0)
ASKED, PEER = SamplingCancelled(3, 4), PeerLostError("peer")
RECORD = StepRecord(index=0, expert="high", sigma=1.0, wall_s=0.001, compute_s=0.001, stall_s=0.0, bytes_moved=0)
TOLD = StepReport(run_id="", rank=0, record=RECORD, done=1, total=2)
LIMIT_S = 60.0
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))


class Handle:
    """See `WorkerHandle`; its task ends when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: Future[TaskResult] = Future()
        self.asked: list[str] = []
        self.begun = self.pulses = 0

    def ask(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "pulse":
            self.pulses += 1
            answer.set_result(self.begun)
            return answer
        self.asked.append(method)
        answer.set_result(None)
        return answer

    def run(self, task: RunTask, on_told: Callable[[StepReport], None]) -> Future[TaskResult]:
        self.tell = on_told
        return self.ended

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        raise AssertionError("nobody is late")

    def end(self, outcome: TaskResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)


def begun(
    make_task: Callable[..., RunTask], count: int, *, timeout_s: float = 60.0
) -> tuple[TaskRun, list[Handle], list[TaskEnd]]:
    handles, ends = [Handle(rank) for rank in range(count)], list[TaskEnd]()
    task = TaskRun(
        handles,
        [make_task()] * count,
        timeout_s=timeout_s,
        on_told=lambda place, told: None,
        on_over=ends.append,
    )
    task.begin()
    return task, handles, ends


@pytest.mark.parametrize(
    ("outcomes", "stopped", "verdict", "together"),
    [
        ([ENDED, ENDED], False, TaskVerdict.ENDED, True),
        ([ASKED, ASKED], True, TaskVerdict.STOPPED, True),
        ([ENDED, SHORT], False, TaskVerdict.SMALLER, False),
        ([ASKED, PEER], True, TaskVerdict.STOPPED, False),
        ([PEER, ASKED], True, TaskVerdict.STOPPED, False),
    ],
)
def test_workers_stay_together_where_all_have_ended_alike(
    make_task: Callable[..., RunTask],
    outcomes: list[TaskResult | BaseException],
    stopped: bool,
    verdict: TaskVerdict,
    together: bool,
) -> None:
    task, handles, ends = begun(make_task, len(outcomes))
    if stopped:
        task.stop()
    for handle, outcome in zip(handles, outcomes, strict=True):
        handle.end(outcome)
    (end,) = ends
    assert (end.verdict, task.together) == (verdict, together)


@pytest.mark.parametrize("outcome", [ENDED, ASKED, PEER], ids=["ended", "stopped", "peer"])
def test_who_was_silent_for_too_long_has_left_whatever_came_then(
    make_task: Callable[..., RunTask], outcome: TaskResult | BaseException
) -> None:
    task, (handle,), ends = begun(make_task, 1, timeout_s=0.01)
    handle.tell(TOLD)
    time.sleep(0.15)
    task.look()
    assert handle.asked == ["leave", "stop"]
    handle.end(outcome)
    (end,) = ends
    assert (end.verdict, task.together) == (TaskVerdict.LOST, False)
    assert isinstance(end.error, WorkerTimeoutError)
    assert dict(end.ended) == ({0: ENDED} if outcome is ENDED else {})


def test_who_begins_blocks_is_not_silent_however_long_its_step_takes(make_task: Callable[..., RunTask]) -> None:
    task, handles, ends = begun(make_task, 2, timeout_s=0.1)
    handles[0].tell(TOLD)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        handles[1].begun += 1
        task.look()
        time.sleep(0.01)
    assert [handle.asked for handle in handles] == [[], []]
    assert handles[0].pulses <= 20, "asked now and then"
    while not handles[0].asked and time.monotonic() < until + LIMIT_S:
        task.look()
        time.sleep(0.01)
    for handle in handles:
        handle.end(ASKED)
    (end,) = ends
    assert isinstance(end.error, WorkerTimeoutError)


def test_silence_is_longer_than_what_workers_wait_for_each_other_and_not_much() -> None:
    """Whoever has nobody that waits for it is missed after ten minutes, where others would be after five."""
    assert silence_limit(300, begun=True) == 600
    assert 600 < silence_limit(300, begun=False) < 900
    assert silence_limit(1, begun=False) > 60, "opening files takes its time, however short blocks are"
    assert silence_limit(1, begun=True, slowest_s=60) >= 600


def test_a_worker_that_does_not_answer_is_asked_once(make_task: Callable[..., RunTask]) -> None:
    asked: list[Future[int]] = []

    class Silent(Handle):
        def ask(self, method: str, *args: Any) -> Future[Any]:
            asked.append(Future())
            return asked[-1]

    pulse = Heartbeat([Silent(0)], timeout_s=0.02)
    for count in (1, 1, 2):
        time.sleep(0.03)
        pulse.look()
        assert len(asked) == count
        if count == 1 and len(asked) == 1 and pulse.silence_s > 0.05:
            asked[0].set_exception(PEER)
    assert not pulse.begun


def test_a_task_that_is_over_keeps_no_tensors(make_task: Callable[..., RunTask]) -> None:
    ends: list[TaskEnd] = []
    task, handle = make_task(), Handle(0)
    sent = weakref.ref(task)
    run = TaskRun([handle], [task], timeout_s=60, on_told=lambda place, told: None, on_over=ends.append)
    run.begin()
    del task
    assert sent() is not None
    handle.end(ENDED)
    assert len(ends) == 1
    assert sent() is None
    run.stop()
    run.look()
