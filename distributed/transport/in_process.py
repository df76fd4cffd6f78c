"""Pool with one worker on a thread in this process, for runs without other processes."""

from __future__ import annotations

import pkgutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from typing import Any, ParamSpec, TypeVar

from ...sampling.inputs import DenoiseRequest
from ..messages import RunTask, TaskResult
from .pool import OnReport, WorkerLostError
from .threads import WorkThread, run_in_thread

P = ParamSpec("P")
R = TypeVar("R")

END_TIMEOUT_S = 60.0


PACKAGE = __name__.rsplit(".", 3)[0]
WORKER = "distributed.worker.worker:Worker"
"""Worker class. Pools only name it, as Ray's actors do, and import no worker code."""


class InProcessWorker:
    """Worker on a thread; implements `WorkerHandle`.

    After `kill`, the run stops before the next block and is lost.

    Args:
        worker: a `Worker`. This module does not import the class.
    """

    rank = 0

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._thread = WorkThread("wanstream worker")
        self._lock = threading.Lock()
        self._run_ids: deque[str] = deque(maxlen=2)
        """Ids of the last two runs. The first of them may still be ending."""
        self._killed = False
        self._ended: Future[None] = Future()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """See `WorkerHandle.call`."""
        # On another thread: the worker's thread may be in a run.
        return run_in_thread(
            "wanstream call", self._alive, methodcaller(method, *args), self._worker
        )

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """See `WorkerHandle.run`."""
        with self._lock:
            if self._killed:  # the thread ends
                return self.call("run", task, on_report)
            self._run_ids.append(task.run_id)
            return self._thread.submit(self._alive, self._worker.run, task, on_report)

    def log_tail(self) -> str:
        """See `WorkerHandle.log_tail`. Empty: the worker writes to this process's output."""
        return ""

    def kill(self) -> None:
        """See `WorkerHandle.kill`."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            for run_id in self._run_ids:
                self._worker.stop(run_id)
            # On the worker's thread, so that it waits for the run.
            self._ended = self._thread.submit(self._worker.close)
            # The closed thread runs no later call, so `self._worker.close` is submitted before.
            self._thread.close()

    def end(self) -> None:
        """Kill the worker, and wait up to `END_TIMEOUT_S` until the memory is released."""
        self.kill()
        wait([self._ended], timeout=END_TIMEOUT_S)

    def _alive(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function.

        Raises WorkerLostError if the worker was killed before or during the call.
        """
        cause = None
        try:
            if not self._killed:
                return function(*args, **kwargs)
        except Exception as err:
            if not self._killed:
                raise
            cause = err
        raise WorkerLostError("the worker in this process was ended", self.rank) from cause


class InProcessPool:
    """Pool with one worker in this process; implements `Pool`.

    `device` is "cpu" or for example "cuda:0".
    """

    usable = True

    def __init__(self, device: str) -> None:
        self._device = device
        self.workers = (self._start(),)

    def share(self, requests: Sequence[DenoiseRequest]) -> AbstractContextManager[object]:
        """See `Pool.share`. Tasks are not sent."""
        return nullcontext()

    def replace(self, rank: int) -> InProcessWorker:
        """See `Pool.replace`."""
        assert rank == 0, f"rank {rank} of one worker"
        self.close()
        self.workers = (self._start(),)
        return self.workers[0]

    def _start(self) -> InProcessWorker:
        return InProcessWorker(pkgutil.resolve_name(f"{PACKAGE}.{WORKER}")(self._device))

    def close(self) -> None:
        """See `Pool.close`."""
        self.workers[0].end()
