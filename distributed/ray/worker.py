"""Worker side of Ray: a `Worker` in the process of an actor."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from ..messages import RunTask, StepReport, TaskResult, WorkerFacts
from ..transport.threads import WorkThread
from ..worker.worker import Worker
from .environment import import_ray


@dataclass(frozen=True, kw_only=True)
class Started:
    """Report of a worker's process that is ready."""

    facts: WorkerFacts
    node_id: str
    """Ray's id of its machine; cloned machines may share a host name."""
    logs: tuple[str, ...]
    """Log files on its machine, with its stdout and stderr."""
    requires_token: bool
    """True if Ray requires a token there."""


class RayWorker:
    """Worker in a process that Ray has started.

    Args:
        threads: CPU threads to compute with; None: the cores of this machine divided by its number of workers.
        workers_here: number of workers on this machine.
    """

    def __init__(self, *, threads: int | None, workers_on_machine: int) -> None:
        ray = import_ray()
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._worker = Worker(
            "cuda:0" if ray.get_gpu_ids() else "cpu",
            address=ray.util.get_node_ip_address(),
            machine=self._node_id,
            threads=threads or max(1, _cores() // workers_on_machine),
        )
        self._thread = WorkThread("wanstream worker")

    def started(self) -> Started:
        """Return facts and log files of this worker."""
        token = os.environ.get("RAY_AUTH_MODE") == "token"
        return Started(facts=self._worker.facts(), node_id=self._node_id, logs=_logs(), requires_token=token)

    def ask(self, method: str, args: tuple[Any, ...]) -> Any:
        """See `WorkerHandle.ask`."""
        return getattr(self._worker, method)(*args)

    def run(self, task: RunTask) -> Iterator[StepReport | TaskResult]:
        """Yield a report after every step, then the result. Raises as `Worker.run`."""
        # The run has its own thread, because this generator is suspended while Ray sends a report.
        reports: queue.SimpleQueue[StepReport | None] = queue.SimpleQueue()
        result = self._thread.submit(self._worker.run, task, reports.put)
        result.add_done_callback(lambda _: reports.put(None))
        while (report := reports.get()) is not None:
            yield report
        yield result.result()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else psutil.cpu_count() or 1


def _logs() -> tuple[str, ...]:
    """Return the files of stdout and stderr, as set up by Ray; empty except on Linux."""
    try:
        return tuple(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    except OSError:
        return ()
