"""Tasks on a group's workers: how they end, and whether the workers can go on as they are."""

import gc
import queue
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from wanstream.distributed.driver import heartbeat, worker_group
from wanstream.distributed.driver.heartbeat import Heartbeat
from wanstream.distributed.driver.rendezvous import Rendezvous
from wanstream.distributed.driver.results import TaskLog
from wanstream.distributed.driver.stage_run import Inbox, JobEnd, JobEvent
from wanstream.distributed.messages import RunTask, StepReport, TaskResult
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.distributed.worker.worker import Worker
from wanstream.sampling import steps as sampling
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.records import StepRecord, Timeline
from wanstream.schema.refs import WorkersRef

RESULT = TaskResult(timeline=Timeline(kind="measured", steps=()), gathered_bytes=5)
CANCELLED = sampling.SamplingCancelled(3, 4)
PEER = PeerLostError("peer")
GONE = WorkerLostError("gone", 1)
HUNG = WorkerTimeoutError("hung")
RESET = RuntimeError("reset")
SHORT = sampling.SmallerPolicyError("short", OffloadPolicy.layerwise(0))
WRONG = sampling.InsufficientMemoryError("no room")
TIMES = {"wall_s": 0.001, "compute_s": 0.001, "stall_s": 0.0, "bytes_moved": 0}
RECORD = StepRecord.of(index=0, expert="high", sigma=1.0, **TIMES)
LIMIT_S = 60.0
ENDED, FAILED, SMALLER, LOST, KILLED, STOPPED, FINISHED = worker_group.TaskOutcome


def errors_of(outcomes):
    return {place: each for place, each in enumerate(outcomes) if isinstance(each, BaseException)}


@pytest.mark.parametrize(
    ("outcomes", "killed", "outcome", "place"),
    [
        ([RESULT, GONE], (), ENDED, 1),
        ([PEER, GONE], (), ENDED, 1),
        ([RESET, GONE], (), ENDED, 1),
        ([SHORT, GONE], (), ENDED, 1),
        ([WRONG, PEER], (), FAILED, 0),
        ([PEER, WRONG], (), FAILED, 1),
        ([WRONG, GONE], (1,), FAILED, 0),
        ([PEER, SHORT], (), SMALLER, 1),
        ([SHORT, SHORT], (), SMALLER, 0),
        ([SHORT, GONE], (1,), SMALLER, 0),
        ([PEER, PEER], (), LOST, 0),
        ([GONE, HUNG], (0,), LOST, 1),
        ([GONE], (0,), KILLED, 0),
        ([CANCELLED, CANCELLED], (), STOPPED, 0),
        ([PEER, CANCELLED], (), LOST, 0),
    ],
)
def test_the_error_that_caused_the_others_is_returned(outcomes, killed, outcome, place):
    end = worker_group.classify_failure(errors_of(outcomes), killed=killed, stopped=False)
    assert (end.outcome, end.place) == (outcome, place)
    assert end.error is outcomes[place]
    assert end.outcome.is_loss == (outcome in (ENDED, LOST, KILLED))


@pytest.mark.parametrize(
    "outcomes", [[CANCELLED, PEER], [WRONG, CANCELLED], [GONE, CANCELLED], [SHORT, RESULT], [GONE]]
)
def test_any_error_of_a_stopped_task_counts_as_stopped(outcomes):
    end = worker_group.classify_failure(errors_of(outcomes), killed=(), stopped=True)
    assert end.outcome is STOPPED
    assert (end.error is CANCELLED) == (CANCELLED in outcomes)
    finished = worker_group.classify_failure({}, killed=(), stopped=True)
    assert finished == (FINISHED, None, 0), "even after a stop"


class Handle:
    """`WorkerHandle` with a task ended by the test."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: Future[TaskResult] = Future()
        self.calls: list[str] = []
        self.begun = self.pulses = 0

    def call(self, method, *args):
        answer = Future()
        if method == "blocks_begun":
            self.pulses += 1
            answer.set_result(self.begun)
        else:
            self.calls.append(method)
            answer.set_result(None)
        return answer

    def run(self, task, on_report):
        run_id = task.run_id
        self.report = lambda report: on_report(replace(report, run_id=run_id))
        return self.ended

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        raise AssertionError("no worker is late")

    def end(self, outcome):
        failed = isinstance(outcome, BaseException)
        (self.ended.set_exception if failed else self.ended.set_result)(outcome)


class Running:
    """Group with a job on these handles. `poll` passes all messages to it, as `StageRun` does."""

    def __init__(self, handles: list[Handle], task: RunTask, timeout_s: float) -> None:
        self.log = TaskLog()
        count = len(handles)
        ref = WorkersRef(count=count, timeout_s=timeout_s)
        pool = SimpleNamespace(workers=handles)
        self.rendezvous = Rendezvous(pool, ref, range(count), Mesh(cfg=count))
        self.rendezvous.is_joined = True
        self._inbox: Inbox = queue.SimpleQueue()
        group = worker_group.WorkerGroup(self.rendezvous, [task], [None], self.log)
        self.jobs = [group.start(Assignment(GroupId(0, 0), 0, range(4)), self._inbox)]

    def poll(self) -> list[JobEvent]:
        found = list[JobEvent]()
        while self.jobs and not (found and found[-1].end):
            if self._inbox.empty():
                event = self.jobs[0].check_time()
            elif (message := self._inbox.get()).run_id == self.jobs[0].run_id:
                event = self.jobs[0].receive(message)
            if event is not None:
                found.append(event)
            elif self._inbox.empty():
                break
        if found and found[-1].end:
            self.jobs.clear()
        return found

    def end(self) -> JobEnd:
        """Return the job's end, which must be the only event left."""
        (event,) = self.poll()
        assert self.poll() == []
        return event.end


@pytest.fixture
def report(make_task):
    """Return the leader's report after the first step."""
    state = sampling.RunState(next_step=1, latents=make_task().request.noise, history={})
    return StepReport(run_id="", place=0, record=RECORD, state=state)


@pytest.fixture
def start_group(make_task):
    """`start_group(2, timeout_s=60.0)` returns a group with a started job, and worker handles."""

    def start(count: int, timeout_s: float = 60.0) -> tuple[Running, list[Handle]]:
        handles = [Handle(rank) for rank in range(count)]
        return Running(handles, make_task(), timeout_s), handles

    return start


@pytest.mark.parametrize(
    ("outcomes", "error", "resumable", "joined"),
    [
        ([RESULT, RESULT], None, False, True),
        ([CANCELLED, CANCELLED], CANCELLED, False, True),
        ([RESULT, SHORT], SHORT, True, False),
        ([CANCELLED, PEER], CANCELLED, False, False),
        ([PEER, CANCELLED], CANCELLED, False, False),
    ],
)
def test_workers_stay_joined_if_all_end_alike(start_group, outcomes, error, resumable, joined):
    group, handles = start_group(len(outcomes))
    if error is CANCELLED:
        group.jobs[0].stop()
    for handle, outcome in zip(handles, outcomes, strict=True):
        handle.end(outcome)
    end = group.end()
    assert (end.error, end.can_resume, end.counts_as_failure) == (error, resumable, False)
    assert group.rendezvous.is_joined == joined


def test_an_error_of_the_task_names_its_worker(start_group):
    group, handles = start_group(2)
    handles[1].end(WRONG)
    assert group.poll() == [], "the other worker still computes"
    assert [handle.calls for handle in handles] == [["leave", "stop"], ["leave"]]
    handles[0].end(PEER)
    end = group.end()
    assert isinstance(end.error, worker_group.WorkerFailedError)
    assert (str(end.error), end.error.__cause__) == ("worker 1 failed: no room", WRONG)
    assert not end.can_resume


@pytest.mark.parametrize("outcome", [RESULT, CANCELLED, PEER], ids=["ended", "stopped", "peer"])
def test_a_group_silent_for_too_long_is_lost_whatever_it_returns(start_group, report, outcome):
    group, (handle,) = start_group(1, 0.01)
    handle.report(report)
    (step,) = group.poll()
    assert (step.report.record.index, step.next_step, step.end) == (0, 1, None)
    time.sleep(0.15)
    assert group.poll() == []
    assert handle.calls == ["leave", "stop"]
    handle.end(outcome)
    end = group.end()
    assert isinstance(end.error, WorkerTimeoutError)
    assert end.can_resume
    assert end.counts_as_failure
    assert not group.rendezvous.is_joined
    # Results that arrive late are kept.
    gathered = group.log.result(0.0, [report.state], restarts=0).gathered_bytes
    assert gathered == (5 if outcome is RESULT else 0)


def test_a_group_that_begins_blocks_is_not_silent(start_group, report):
    group, handles = start_group(2, 0.1)
    handles[0].report(report)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        handles[1].begun += 1
        group.poll()
        time.sleep(0.01)
    assert [handle.calls for handle in handles] == [[], []], "however long its step takes"
    assert handles[0].pulses <= 20, "polled at intervals"
    while not handles[0].calls and time.monotonic() < until + LIMIT_S:
        group.poll()
        time.sleep(0.01)
    for handle in handles:
        handle.end(CANCELLED)
    assert isinstance(group.end().error, WorkerTimeoutError)


@pytest.mark.parametrize("machines", ["aa", "ab"])
def test_stop_between_machines_waits_for_the_step(machines, start_group, monkeypatch):
    """Workers stop before their next step, which may start after the timeout."""
    killed = list[int]()
    clock = [0.0]
    monkeypatch.setattr(Handle, "kill", lambda handle: killed.append(handle.rank))
    # A busy machine may pause the test beyond the silence limit.
    for module in (heartbeat, worker_group):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    group, handles = start_group(2, 5.0)
    facts = Worker("cpu").facts()
    group.rendezvous.facts = tuple(replace(facts, machine=name) for name in machines)
    group.jobs[0].stop()
    for second in range(1, 30):
        clock[0] = second
        handles[0].begun += 1
        assert group.poll() == []
    assert [handle.calls for handle in handles] == [["stop"], ["stop"]]
    assert killed == ([] if machines == "ab" else [0, 1])
    for handle in handles:
        handle.end(CANCELLED)
    assert group.end().error is CANCELLED


def test_silence_limit_is_above_the_timeout():
    """A worker without waiting peers is found after ten minutes, one with peers after five."""
    opening, begun, short, slow = (Heartbeat([], timeout_s) for timeout_s in (300, 300, 1, 1))
    begun.record_sign()
    slow.record_sign(60)
    slow.record_sign(1)
    assert begun.limit_s == 600
    assert 600 < opening.limit_s < 900
    assert short.limit_s > 60, "opening files takes its time, however short blocks are"
    assert slow.limit_s >= 600


def test_a_worker_that_does_not_answer_gets_one_request():
    requests: list[Future[int]] = []

    class Silent(Handle):
        def call(self, method, *args):
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


def test_a_task_that_is_over_keeps_no_tensors(make_task):
    sent = list[RunTask]()
    handle = Handle(0)
    run = handle.run
    handle.run = lambda task, on_report: sent.append(task) or run(task, on_report)
    running = Running([handle], make_task(), 60.0)
    reference = weakref.ref(sent[0])
    handle.end(RESULT)
    assert running.end().error is None
    sent.clear()
    gc.collect()
    assert reference() is None
