"""One worker behind Ray, as its driver sees it."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ..messages import RunTask, TaskResult, WorkerFacts
from ..transport.pool import OnReport, WorkerLostError
from ..transport.threads import WorkThread, on_own_thread
from .worker import Started

TAIL_LINES = 30
GRACE_S = 3.0
OF_RAYS_WORKERS = "ray::"
OF_RAY = (":job_id:", ":actor_name:", ":task_name:")


class RayWorkerHandle:
    """See `WorkerHandle`. `is_here`: whether it runs on the machine of its driver."""

    def __init__(self, ray: Any, actor: Any, rank: int, started: Started, *, is_here: bool) -> None:
        self._ray, self._actor, self._rank = ray, actor, rank
        self._thread = WorkThread(f"wanstream worker {rank}")
        self._lock = threading.Lock()
        self._killed = False
        self._process = _process_here(started.facts) if is_here else None
        self.started = started

    @property
    def rank(self) -> int:
        """See `WorkerHandle.rank`."""
        return self._rank

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """See `WorkerHandle.ask`."""
        future: Future[Any] = Future()
        with self._lock:
            # Asked without a connection, Ray would start once more, with none of our settings.
            if self._killed or not self._ray.is_initialized():
                future.set_exception(self._lost("it was ended from here"))
                return future
            answer = self._actor.ask.remote(method, args).future()
        answer.add_done_callback(lambda answered: self._pass_on(answered, future))
        return future

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """See `WorkerHandle.run`."""
        with self._lock:
            if self._killed:
                future: Future[TaskResult] = Future()
                future.set_exception(self._lost("it was ended from here"))
                return future
            return self._thread.submit(self._run, task, on_report)

    def log_tail(self) -> str:
        """See `WorkerHandle.log_tail`; empty too where the log is on another machine."""
        files = [Path(name) for name in self.started.logs]
        return "\n".join(filter(None, (tail(file) for file in files if file.is_file())))

    def kill(self) -> None:
        """See `WorkerHandle.kill`."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            self._thread.close()
            if self._ray.is_initialized():
                self._ray.kill(self._actor)
            if self._process is not None:
                on_own_thread("wanstream end of a worker", _end, self._process)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until its process is gone, and its memory with it, if it is on this machine."""
        if self._process is not None:
            psutil.wait_procs([self._process], timeout=timeout_s)

    def _run(self, task: RunTask, on_report: OnReport) -> TaskResult:
        try:
            for message in self._actor.run.remote(task):
                report = self._ray.get(message)
                if isinstance(report, TaskResult):
                    return report
                try:
                    on_report(report)
                except BaseException:
                    self.ask("stop", task.run_id)
                    raise
        except self._ray.exceptions.RayError as err:
            raise self._worded(err) from err
        raise self._lost("its run ended without a result")

    def _pass_on(self, answered: Future[Any], future: Future[Any]) -> None:
        error = answered.exception()
        if error is None:
            future.set_result(answered.result())
        elif isinstance(error, self._ray.exceptions.RayError):
            future.set_exception(self._worded(error))
        else:
            future.set_exception(error)

    def _worded(self, error: Any) -> BaseException:
        """What the worker raised, or that it is lost."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause = error.cause
            return cause if isinstance(cause, Exception) else RuntimeError(str(error))
        if isinstance(error, self._ray.exceptions.UnserializableException):
            return RuntimeError(str(error))  # of a class that cannot be made again from its arguments
        return self._lost("it was ended from here" if self._killed else describe_exit(str(error)))

    def _lost(self, how: str) -> WorkerLostError:
        facts, said = self.started.facts, self.log_tail()
        where = f"worker {self._rank} (process {facts.pid} on {facts.node}, {facts.device}) is gone: {how}"
        logs = " and ".join(self.started.logs)
        if said:
            where += f"\nThe end of its log ({logs}):\n{said}"
        elif logs:
            where += f"; its log, which says nothing or is on its machine, is {logs}"
        return WorkerLostError(where, self._rank)


def _process_here(facts: WorkerFacts) -> psutil.Process | None:
    """The process of a worker of this machine; None where it has ended."""
    try:
        process = psutil.Process(facts.pid)
        return process if OF_RAYS_WORKERS in " ".join(process.cmdline()) else None
    except psutil.NoSuchProcess:
        return None


def _end(process: psutil.Process) -> None:
    """End it if it does not hear Ray, which has asked it to; ended at once, Ray would tell the user of an accident."""
    psutil.wait_procs([process], timeout=GRACE_S)
    with suppress(psutil.NoSuchProcess):
        process.kill()


def describe_exit(told: str) -> str:
    """How a process ended, out of what Ray says of it; what surrounds it are remarks on Ray."""
    _, found, detail = told.partition("Worker exit detail:")
    words = (detail if found else told).split("Some common causes")[0]
    return " ".join(words.split()) or "nobody knows why"


def tail(file: Path) -> str:
    """The last lines of a log, without those that Ray puts into it for itself."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        own = (line for line in lines if not line.startswith(OF_RAY))
        return "".join(deque(own, maxlen=TAIL_LINES)).strip()
