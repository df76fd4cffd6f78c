"""Task on the workers of a group: how it ends, and whether the workers can compute another one as they are."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.distributed.driver import heartbeat, worker_group
from wanstream.distributed.driver.heartbeat import Heartbeat
from wanstream.distributed.driver.rendezvous import Rendezvous
from wanstream.distributed.driver.results import TaskLog
from wanstream.distributed.driver.stage_run import GroupEnd, StepTaken
from wanstream.distributed.driver.worker_group import WorkerFailedError, WorkerGroup
from wanstream.distributed.messages import RunTask, StepReport, TaskResult
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.distributed.worker.worker import Worker
from wanstream.plan.workers.jobs import Assignment, GroupId
from wanstream.sampling import InsufficientMemoryError, RunState, SamplingCancelled, SmallerPolicyError
from wanstream.schema import Mesh, OffloadPolicy, StepRecord, Timeline, WorkersRef

RESULT = TaskResult(timeline=Timeline(kind="measured", steps=()), gathered_bytes=5)
CANCELLED, PEER, WRONG = SamplingCancelled(3, 4), PeerLostError("peer"), InsufficientMemoryError("no room")
RECORD = StepRecord(index=0, expert="high", sigma=1.0, wall_s=0.001, compute_s=0.001, stall_s=0.0, bytes_moved=0)
LIMIT_S = 60.0
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))
GROUP = GroupId(0, 0)


class Handle:
    """See `WorkerHandle`; the test ends its task."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: Future[TaskResult] = Future()
        self.calls: list[str] = []
        self.begun = self.pulses = 0

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "blocks_begun":
            self.pulses += 1
            answer.set_result(self.begun)
            return answer
        self.calls.append(method)
        answer.set_result(None)
        return answer

    def run(self, task: RunTask, on_report: Callable[[StepReport], None]) -> Future[TaskResult]:
        self.report = on_report
        return self.ended

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        raise AssertionError("no worker is late")

    def end(self, outcome: TaskResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)


StartGroup = Callable[..., tuple[WorkerGroup, list[Handle]]]


@pytest.fixture
def report(make_task: Callable[..., RunTask]) -> StepReport:
    """Report of the leader after the first step."""
    state = RunState(next_step=1, latents=make_task().request.noise, history={})
    return StepReport(record=RECORD, state=state)


@pytest.fixture
def start_group(make_task: Callable[..., RunTask]) -> StartGroup:
    """`start_group(2, timeout_s=60.0)`: a group that has started a job, and the handles of its workers."""

    def start(
        count: int, *, timeout_s: float = 60.0, wake: threading.Event | None = None, log: TaskLog | None = None
    ) -> Any:
        handles, task = [Handle(rank) for rank in range(count)], make_task()
        pool: Any = SimpleNamespace(workers=handles)
        ref = WorkersRef(count=count, timeout_s=timeout_s)
        group = WorkerGroup(Rendezvous(pool, ref, range(count), Mesh(cfg=count)))
        group.rendezvous.is_joined = True
        group.assign([task], log or TaskLog())
        group.start(Assignment(GROUP, 0, range(4)), None, wake or threading.Event())
        return group, handles

    return start


def ended(group: WorkerGroup) -> GroupEnd:
    """Return the end of the job, which must be its only event left."""
    (event,) = group.poll()
    assert isinstance(event, GroupEnd)
    assert group.poll() == []
    return event


@pytest.mark.parametrize(
    ("outcomes", "stopped", "error", "resumable", "joined"),
    [
        ([RESULT, RESULT], False, None, False, True),
        ([CANCELLED, CANCELLED], True, CANCELLED, False, True),
        ([RESULT, SHORT], False, SHORT, True, False),
        ([CANCELLED, PEER], True, CANCELLED, False, False),
        ([PEER, CANCELLED], True, CANCELLED, False, False),
    ],
)
def test_workers_stay_joined_if_all_end_alike(
    start_group: StartGroup,
    outcomes: list[TaskResult | BaseException],
    stopped: bool,
    error: BaseException | None,
    resumable: bool,
    joined: bool,
) -> None:
    group, handles = start_group(len(outcomes))
    if stopped:
        group.stop()
    for handle, outcome in zip(handles, outcomes, strict=True):
        handle.end(outcome)
    end = ended(group)
    assert (end.error, end.can_resume, end.counts_as_failure) == (error, resumable, False)
    assert group.rendezvous.is_joined == joined


def test_an_error_of_the_task_names_its_worker(start_group: StartGroup) -> None:
    group, handles = start_group(2)
    handles[1].end(WRONG)
    assert group.poll() == [], "the other worker still computes"
    assert [handle.calls for handle in handles] == [["leave", "stop"], ["leave"]]
    handles[0].end(PEER)
    end = ended(group)
    assert isinstance(end.error, WorkerFailedError)
    assert (str(end.error), end.error.__cause__, end.can_resume) == ("worker 1 failed: no room", WRONG, False)


@pytest.mark.parametrize("outcome", [RESULT, CANCELLED, PEER], ids=["ended", "stopped", "peer"])
def test_a_group_that_was_silent_for_too_long_is_lost_whatever_it_returns_then(
    start_group: StartGroup, report: StepReport, outcome: TaskResult | BaseException
) -> None:
    log = TaskLog()
    group, (handle,) = start_group(1, timeout_s=0.01, log=log)
    handle.report(report)
    (step,) = group.poll()
    assert isinstance(step, StepTaken)
    assert step.next_step == 1
    time.sleep(0.15)
    assert group.poll() == []
    assert handle.calls == ["leave", "stop"]
    handle.end(outcome)
    end = ended(group)
    assert isinstance(end.error, WorkerTimeoutError)
    assert (end.can_resume, end.counts_as_failure, group.rendezvous.is_joined) == (True, True, False)
    assert log.gathered_bytes == (5 if outcome is RESULT else 0), "results that arrive late are kept"


def test_a_group_that_begins_blocks_is_not_silent_however_long_its_step_takes(
    start_group: StartGroup, report: StepReport
) -> None:
    group, handles = start_group(2, timeout_s=0.1)
    handles[0].report(report)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        handles[1].begun += 1
        group.poll()
        time.sleep(0.01)
    assert [handle.calls for handle in handles] == [[], []]
    assert handles[0].pulses <= 20, "polled at intervals"
    while not handles[0].calls and time.monotonic() < until + LIMIT_S:
        group.poll()
        time.sleep(0.01)
    for handle in handles:
        handle.end(CANCELLED)
    assert isinstance(ended(group).error, WorkerTimeoutError)


@pytest.mark.parametrize("apart", [False, True], ids=["one machine", "several machines"])
def test_a_stop_waits_for_the_step_of_a_group_on_several_machines(
    apart: bool, start_group: StartGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers stop before their next step, which may be further away than the timeout."""
    killed: list[int] = []
    monkeypatch.setattr(Handle, "kill", lambda handle: killed.append(handle.rank))
    clock = [0.0]
    # A busy machine may pause the test for longer than the silence limit.
    for module in (heartbeat, worker_group):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    group, handles = start_group(2, timeout_s=5.0)
    group.rendezvous.facts = tuple(
        replace(Worker("cpu").facts(), machine=name) for name in ("a", "b" if apart else "a")
    )
    group.stop()
    for second in range(1, 30):
        clock[0] = second
        handles[0].begun += 1
        assert group.poll() == []
    assert [handle.calls for handle in handles] == [["stop"], ["stop"]]
    assert killed == ([] if apart else [0, 1])
    for handle in handles:
        handle.end(CANCELLED)
    assert ended(group).error is CANCELLED


def test_the_silence_limit_is_somewhat_longer_than_the_timeout_of_workers() -> None:
    """A worker without waiting peers is found after ten minutes; one with waiting peers is found after five."""
    opening, begun, short, slow = (Heartbeat([], timeout_s) for timeout_s in (300, 300, 1, 1))
    begun.record_sign()
    slow.record_sign(60)
    slow.record_sign(1)
    assert begun.limit_s == 600
    assert 600 < opening.limit_s < 900
    assert short.limit_s > 60, "opening files takes its time, however short blocks are"
    assert slow.limit_s >= 600


def test_a_worker_that_does_not_answer_gets_one_request() -> None:
    requests: list[Future[int]] = []

    class Silent(Handle):
        def call(self, method: str, *args: Any) -> Future[Any]:
            requests.append(Future())
            return requests[-1]

    heartbeat = Heartbeat([Silent(0)], timeout_s=0.02)
    for number, count in enumerate((1, 1, 2)):
        time.sleep(0.03)
        assert not heartbeat.is_overdue()
        assert len(requests) == count
        if number == 1:
            requests[0].set_exception(PEER)
    assert heartbeat.limit_s > 60, "an error is not a sign of life"


def test_every_message_wakes_the_run_and_none_of_an_ended_task_arrives(
    start_group: StartGroup, report: StepReport
) -> None:
    wake = threading.Event()
    group, (handle,) = start_group(1, wake=wake)
    for send in (lambda: handle.report(report), lambda: handle.end(RESULT)):
        assert not wake.is_set()
        send()
        assert wake.is_set()
        assert len(group.poll()) == 1
        wake.clear()
    handle.report(report)
    assert group.poll() == []


def test_a_run_that_was_interrupted_while_it_stopped_leaves_no_task_to_the_next(
    start_group: StartGroup, make_task: Callable[..., RunTask], report: StepReport
) -> None:
    group, (handle,) = start_group(1)
    send_late, handle.ended = handle.report, Future()
    task = make_task()
    group.assign([task], TaskLog())
    group.start(Assignment(GROUP, 0, range(4)), None, threading.Event())
    send_late(report)
    assert group.poll() == [], "a report of the former task"
    handle.end(RESULT)
    assert ended(group).error is None


def test_a_task_that_is_over_keeps_no_tensors(make_task: Callable[..., RunTask]) -> None:
    sent: list[weakref.ref[RunTask]] = []
    run = Handle.run

    class Recording(Handle):
        def run(self, task: RunTask, on_report: Callable[[StepReport], None]) -> Future[TaskResult]:
            sent.append(weakref.ref(task))
            self.task: RunTask | None = task
            return run(self, task, on_report)

    handle, task = Recording(0), make_task()
    pool: Any = SimpleNamespace(workers=[handle])
    group = WorkerGroup(Rendezvous(pool, WorkersRef(count=1), [0], Mesh()))
    group.assign([task], TaskLog())
    group.start(Assignment(GROUP, 0, range(4)), None, threading.Event())
    (reference,) = sent
    assert reference() is not None
    handle.end(RESULT)
    assert ended(group).error is None
    handle.task = None
    gc.collect()
    assert reference() is None
    group.stop()
    assert group.poll() == []
