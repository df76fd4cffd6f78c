"""A task on the workers of a cell: how it ends, and whether they may take another one as they are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from wanstream.distributed.peer_errors import HungError, PeerLostError
from wanstream.distributed.task_run import TaskRun
from wanstream.distributed.task_verdict import TaskEnd, TaskVerdict
from wanstream.distributed.tasks import RunEnded, RunTask
from wanstream.plan import OffloadPolicy, Timeline
from wanstream.sampling import Cancelled, SmallerPolicyError

ENDED = RunEnded(run_id="", rank=0, timeline=Timeline(kind="measured", steps=()), latents=None, sigma=0.0)
ASKED, PEER = Cancelled(3, 4), PeerLostError("peer")
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))


class Handle:
    """See `WorkerHandle`; its task ends when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: Future[RunEnded] = Future()
        self.asked: list[str] = []

    def ask(self, method: str, *args: Any) -> Future[Any]:
        self.asked.append(method)
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer

    def run(self, task: RunTask, on_told: object) -> Future[RunEnded]:
        return self.ended

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        raise AssertionError("nobody is late")

    def end(self, outcome: RunEnded | BaseException) -> None:
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
    outcomes: list[RunEnded | BaseException],
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


def test_who_was_silent_for_too_long_has_left_whatever_came_then(make_task: Callable[..., RunTask]) -> None:
    task, (handle,), ends = begun(make_task, 1, timeout_s=0.01)
    time.sleep(0.15)
    task.look()
    assert handle.asked == ["leave", "stop"]
    handle.end(ENDED)
    (end,) = ends
    assert (end.verdict, task.together) == (TaskVerdict.LOST, False)
    assert isinstance(end.error, HungError)
    assert dict(end.ended) == {0: ENDED}


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
