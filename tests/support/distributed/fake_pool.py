"""Pool of workers on threads that compute next to nothing, and fail on request.

They keep real workers' guarantees: one task at a time, a vote in the whole group before every step,
no messages from a dead process. A step is `latents * 0.75 + step`: the result shows the steps and
their order.
"""

import errno
import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wanstream.distributed import Driver, WorkerLostError
from wanstream.distributed.messages import (
    RendezvousSpec,
    RunTask,
    StepReport,
    TaskResult,
    WorkerFacts,
)
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.distributed.worker.rendezvous import PeerLostError, WorkerTimeoutError
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SOLVERS, RunState, SamplingCancelled
from wanstream.schema import Mesh
from wanstream.schema.records import StepRecord, Timeline
from wanstream.schema.refs import CodeFormat, WorkersRef

FACTS = WorkerFacts(pid=0, node="", address="127.0.0.1", device="cpu", versions={})
Failing = Literal["dies", "hangs", "dies after all reports"] | Exception


@dataclass
class Fault:
    """A worker's failure before a step. It happens once unless it is `always` there."""

    rank: int
    step: int
    failure: Failing
    always: bool = False


class FakeRendezvous:
    """Votes in one rendezvous."""

    def __init__(self, size):
        self._size = size
        self._changed = threading.Condition()
        self._here = 0
        self._votes = dict[int, list[bool]]()
        self._broken = False

    def come(self, timeout_s):
        with self._changed:
            self._here += 1
            self._wait(lambda: self._here >= self._size, timeout_s)

    def vote(self, number, wish, timeout_s):
        with self._changed:
            votes = self._votes.setdefault(number, [])
            votes.append(wish)
            self._wait(lambda: len(votes) >= self._size, timeout_s)
            return any(votes)

    def leave(self):
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _wait(self, there, timeout_s):
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: there() or self._broken, timeout_s):
            raise WorkerTimeoutError(f"no peer came within {timeout_s:g} s")
        if not there():
            raise PeerLostError("another worker has left")


class FakeWorker:
    """Worker on a thread. Implements `WorkerHandle`."""

    def __init__(self, pool, rank, pid):
        self._pool = pool
        self.rank = rank
        self.pid = pid
        self._gone = threading.Event()
        self._stopped: set[str] = set()
        self._rendezvous: tuple[RendezvousSpec, FakeRendezvous] | None = None
        self._busy = threading.Lock()
        self._votes = itertools.count()
        self._begun = 0
        self._kept: tuple[str, RunState] | None = None

    def call(self, method, *args):
        function = self._leave_slowly if method == "leave" else getattr(self, f"_{method}")
        return run_in_thread("fake call", self._alive, function, *args)

    def run(self, task, on_report):
        self._pool.sent.append((self.rank, task))
        return run_in_thread("fake run", self._alive, self._run, task, on_report)

    def log_tail(self):
        return f"the log of process {self.pid}"

    def kill(self):
        self._pool.killed.append(self.rank)
        self._die()

    def _die(self):
        self._gone.set()
        self._leave()

    def _alive(self, function, *args):
        if not self._gone.is_set():
            try:
                result = function(*args)
            except Exception:
                if not self._gone.is_set():
                    raise
            else:
                if not self._gone.is_set():
                    return result
        raise WorkerLostError(f"worker {self.rank} is gone\n{self.log_tail()}", self.rank)

    def _facts(self, paths=(), maps=()):
        generation = 0 if self._rendezvous is None else self._rendezvous[0].generation
        missing = [path for path in self._pool.missing.get(self.rank, ()) if path in paths]
        given: dict[str, Any] = {"machine": self._pool.machines.get(self.rank, "")}
        given["auto_dtype"] = self._pool.auto_dtypes.get(self.rank, "float32")
        given["multiplied"] = self._pool.multiplied.get(self.rank, ("int8", "fp8"))
        given |= {"node": f"node-{self.rank}", "sizes": dict.fromkeys(missing)}
        return replace(FACTS, pid=self.pid, generation=generation, **given)

    def _fast_formats(self, experts, maps):
        assert experts.compute_dtype != "auto", "measured in the dtype of all workers"
        return self._pool.multiplied.get(self.rank, ("int8", "fp8"))

    def _free_port(self):
        return next(self._pool.ports)

    def _join(self, rendezvous):
        self._leave()
        if rendezvous.rank == 0 and rendezvous.port in self._pool.taken:
            raise OSError(errno.EADDRINUSE, f"port {rendezvous.port} at {rendezvous.host} is taken")
        with self._pool.lock:
            met = self._pool.rendezvous.setdefault(
                (rendezvous.port, rendezvous.generation), FakeRendezvous(rendezvous.mesh.size)
            )
        self._pool.joined.append((self.rank, rendezvous))
        self._rendezvous = (rendezvous, met)
        self._votes = itertools.count()
        met.come(rendezvous.timeout_s)

    def _leave(self):
        left = self._rendezvous
        self._rendezvous = None
        if left is not None:
            left[1].leave()

    _close = _leave

    def _leave_slowly(self):
        time.sleep(self._pool.leave_s.get(self.rank, 0.0))
        self._leave()

    def _blocks_begun(self):
        return self._begun

    def _last_state(self, run_id):
        kept = self._kept
        return kept[1] if kept is not None and kept[0] == run_id else None

    def _stop(self, run_id):
        self._stopped.add(run_id)

    def _run(self, task, on_report):
        assert self._busy.acquire(blocking=False), "two tasks at a time"
        try:
            return self._take_steps(task, on_report)
        finally:
            self._busy.release()

    def _take_steps(self, task, on_report):
        assert self._rendezvous is not None, "a task without a rendezvous"
        rendezvous, votes = self._rendezvous
        step_plan = task.request.step_plan
        began = time.perf_counter()
        taken = list[StepRecord]()
        state = task.resume or RunState(
            next_step=step_plan.start_step, latents=task.request.noise, history={}
        )
        assert task.until is not None
        leads = rendezvous.rank == 0
        for step in range(state.next_step, task.until):
            self._fail(step)
            self._begun += 1
            if votes.vote(next(self._votes), task.run_id in self._stopped, rendezvous.timeout_s):
                raise SamplingCancelled(step, 0)
            time.sleep(self._pool.step_s)
            expert = step_plan.experts[step]
            history: dict[str, Any] = dict.fromkeys(SOLVERS[task.request.solver].history, step)
            state = RunState(
                next_step=step + 1, latents=state.latents * 0.75 + step, history=history
            )
            times = {"wall_s": 0.03, "compute_s": 0.03, "stall_s": 0.0, "bytes_moved": 100}
            times["start_s"] = time.perf_counter() - began
            sigma = step_plan.schedule.sigmas[step]
            record = StepRecord.of(index=step, expert=expert, sigma=sigma, **times)
            taken.append(record)
            if self._gone.is_set():
                break
            if leads:
                self._kept = task.run_id, state
            # With an interval of 0 after every step, with another interval at the end.
            is_due = leads and (task.handover_s == 0 or state.next_step == task.until)
            place = {"run_id": task.run_id, "place": rendezvous.rank}
            denoised = state.latents if leads and task.preview_s == 0 else None
            handed_over = state if is_due else None
            on_report(StepReport(**place, record=record, denoised=denoised, state=handed_over))
        self._fail(task.until, after_reports=True)
        return TaskResult(timeline=Timeline(steps=tuple(taken), kind="measured"), gathered_bytes=7)

    def _fail(self, step, *, after_reports=False):
        def is_due(fault):
            at_end = fault.failure == "dies after all reports"
            return (fault.rank, fault.step, at_end) == (self.rank, step, after_reports)

        with self._pool.lock:
            due = next(filter(is_due, self._pool.faults), None)
            if due is not None and not due.always:
                self._pool.faults.remove(due)
        if due is None:
            return
        if isinstance(due.failure, Exception):
            raise due.failure
        if due.failure == "hangs":
            assert self._gone.wait(60), "a hung worker was not killed"
        self._die()
        raise RuntimeError("gone")


@dataclass(eq=False)
class FakePool:
    """Pool of `FakeWorker`. Implements `Pool`."""

    count: int
    faults: list[Fault] = field(default_factory=list)
    step_s: float = 0.0
    leave_s: dict[int, float] = field(default_factory=dict)
    """Seconds a worker takes to leave the rendezvous, by rank."""
    sent: list[tuple[int, RunTask]] = field(default_factory=list)
    joined: list[tuple[int, RendezvousSpec]] = field(default_factory=list)
    shared: list[DenoiseRequest] = field(default_factory=list)
    """Currently shared requests."""
    killed: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    """Ports in use."""
    missing: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Missing paths, by rank."""
    machines: dict[int, str] = field(default_factory=dict)
    """Machine identifiers by rank. The others share one machine."""
    rendezvous: dict[tuple[int, int], FakeRendezvous] = field(default_factory=dict)
    auto_dtypes: dict[int, str] = field(default_factory=dict)
    """Dtypes by rank, float32 for the others."""
    multiplied: dict[int, tuple[CodeFormat, ...]] = field(default_factory=dict)
    """Formats a worker multiplies, by rank. The others multiply int8 and fp8."""

    def __post_init__(self):
        self.lock = threading.Lock()
        self.ports = itertools.count(5000)
        self._pids = itertools.count(100)
        self.workers = [FakeWorker(self, rank, next(self._pids)) for rank in range(self.count)]

    @contextmanager
    def share(self, requests):
        self.shared = list(requests)
        try:
            yield
        finally:
            self.shared.clear()

    def replace(self, rank):
        self.replaced.append(rank)
        self.workers[rank] = FakeWorker(self, rank, next(self._pids))
        return self.workers[rank]

    def close(self):
        for worker in self.workers:
            worker.kill()


def driver_of(pool, mesh=None, **changes):
    mesh = mesh or Mesh()
    given = {"count": mesh.size, "timeout_s": 20.0, "max_restarts": 3, **changes}
    return Driver(pool, WorkersRef(**given), mesh)


def expected(noise, steps):
    """Return the workers' latents for a noise after these steps."""
    for step in steps:
        noise = noise * 0.75 + step
    return noise
