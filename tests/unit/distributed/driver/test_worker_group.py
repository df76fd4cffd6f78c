"""Tasks on a group's workers: how they end, and whether the workers can go on as they are."""

from __future__ import annotations

import gc
import queue
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
from wanstream.distributed.driver.stage_run import Inbox, JobEnd, JobEvent
from wanstream.distributed.driver.worker_group import WorkerFailedError, WorkerGroup
from wanstream.distributed.messages import RunTask, StepReport, TaskResult
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.distributed.worker.worker import Worker
from wanstream.sampling.steps import (
    InsufficientMemoryError,
    RunState,
    SamplingCancelled,
    SmallerPolicyError,
)
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.records import StepRecord, Timeline
from wanstream.schema.refs import WorkersRef

RESULT = TaskResult(timeline=Timeline(kind="measured", steps=()), gathered_bytes=5)
CANCELLED, PEER, WRONG = (
    SamplingCancelled(3, 4),
    PeerLostError("peer"),
    InsufficientMemoryError("no room"),
)
RECORD = StepRecord.of(
    index=0, expert="high", sigma=1.0, wall_s=0.001, compute_s=0.001, stall_s=0.0, bytes_moved=0
)
LIMIT_S = 60.0
SHORT = SmallerPolicyError("short", OffloadPolicy.layerwise(0))
GROUP = GroupId(0, 0)


class Handle:
    """`WorkerHandle` with a task ended by the test."""

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
        run_id = task.run_id
        self.report = lambda report: on_report(replace(report, run_id=run_id))
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


class Running:
    """Group with a job. `poll` passes all messages to the job, as `StageRun` does."""

    def __init__(self, group: WorkerGroup) -> None:
        self.rendezvous = group.rendezvous
        self._inbox: Inbox = queue.SimpleQueue()
        self._jobs = [group.start(Assignment(GROUP, 0, range(4)), self._inbox)]

    def poll(self) -> list[JobEvent]:
        found = list[JobEvent]()
        while self._jobs and not (found and found[-1].end):
            if self._inbox.empty():
                event = self._jobs[0].check_time()
            elif (message := self._inbox.get()).run_id == self._jobs[0].run_id:
                event = self._jobs[0].receive(message)
            if event is not None:
                found.append(event)
            elif self._inbox.empty():
                break
        if found and found[-1].end:
            self._jobs.clear()
        return found

    def stop(self) -> None:
        self._jobs[0].stop()


StartGroup = Callable[..., tuple[Running, list[Handle]]]


@pytest.fixture
def report(make_task: Callable[..., RunTask]) -> StepReport:
    """Return the leader's report after the first step."""
    state = RunState(next_step=1, latents=make_task().request.noise, history={})
    return StepReport(run_id="", place=0, record=RECORD, state=state)


@pytest.fixture
def start_group(make_task: Callable[..., RunTask]) -> StartGroup:
    """`start_group(2, timeout_s=60.0)` returns a group with a started job, and worker handles."""

    def start(count: int, *, timeout_s: float = 60.0, log: TaskLog | None = None) -> Any:
        handles, task = [Handle(rank) for rank in range(count)], make_task()
        pool: Any = SimpleNamespace(workers=handles)
        ref = WorkersRef(count=count, timeout_s=timeout_s)
        rendezvous = Rendezvous(pool, ref, range(count), Mesh(cfg=count))
        rendezvous.is_joined = True
        group = WorkerGroup(rendezvous, [task], [None], log or TaskLog())
        return Running(group), handles

    return start


def ended(group: Running) -> JobEnd:
    """Return the job's end, which must be the only event left."""
    (event,) = group.poll()
    assert event.end is not None
    assert group.poll() == []
    return event.end


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
    assert (str(end.error), end.error.__cause__, end.can_resume) == (
        "worker 1 failed: no room",
        WRONG,
        False,
    )


@pytest.mark.parametrize("outcome", [RESULT, CANCELLED, PEER], ids=["ended", "stopped", "peer"])
def test_a_group_that_was_silent_for_too_long_is_lost_whatever_it_returns_then(
    start_group: StartGroup, report: StepReport, outcome: TaskResult | BaseException
) -> None:
    log = TaskLog()
    group, (handle,) = start_group(1, timeout_s=0.01, log=log)
    handle.report(report)
    (step,) = group.poll()
    assert (step.report.record.index, step.next_step, step.end) == (0, 1, None)
    time.sleep(0.15)
    assert group.poll() == []
    assert handle.calls == ["leave", "stop"]
    handle.end(outcome)
    end = ended(group)
    assert isinstance(end.error, WorkerTimeoutError)
    assert (end.can_resume, end.counts_as_failure, group.rendezvous.is_joined) == (
        True,
        True,
        False,
    )
    result = log.result(0.0, [report.state], restarts=0)
    assert result.gathered_bytes == (5 if outcome is RESULT else 0), (
        "results that arrive late are kept"
    )


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
    """Workers stop before their next step, which may start after the timeout."""
    killed: list[int] = []
    monkeypatch.setattr(Handle, "kill", lambda handle: killed.append(handle.rank))
    clock = [0.0]
    # A busy machine may pause the test beyond the silence limit.
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
    """A worker without waiting peers is found after ten minutes, one with peers after five."""
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
    rendezvous = Rendezvous(pool, WorkersRef(count=1), [0], Mesh())
    group = WorkerGroup(rendezvous, [task], [None], TaskLog())
    running = Running(group)
    (reference,) = sent
    assert reference() is not None
    handle.end(RESULT)
    assert ended(running).error is None
    handle.task = None
    gc.collect()
    assert reference() is None
