"""The worker's side of Ray: what the actor passes on to a `Worker` in its process."""

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
    """What a worker's process tells when it is ready."""

    facts: WorkerFacts
    node_id: str
    """Ray's name for its machine; machines that were cloned may share a host name."""
    logs: tuple[str, ...]
    """Files on its machine that hold what it writes."""
    token: bool
    """Whether Ray asks for a token there."""


class ServedWorker:
    """A worker in a process that Ray has started.

    Args:
        threads: CPU threads to compute with; None: the cores of this machine shared out between its workers.
        workers_here: how many of these workers this machine has.
    """

    def __init__(self, *, threads: int | None, workers_here: int) -> None:
        ray = import_ray()
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._worker = Worker(
            "cuda:0" if ray.get_gpu_ids() else "cpu",
            address=ray.util.get_node_ip_address(),
            machine=self._node_id,
            threads=threads or max(1, _cores() // workers_here),
        )
        self._thread = WorkThread("wanstream worker")

    def started(self) -> Started:
        """Who this is."""
        token = os.environ.get("RAY_AUTH_MODE") == "token"
        return Started(facts=self._worker.facts(), node_id=self._node_id, logs=_logs(), token=token)

    def ask(self, method: str, args: tuple[Any, ...]) -> Any:
        """See `WorkerHandle.ask`."""
        return getattr(self._worker, method)(*args)

    def run(self, task: RunTask) -> Iterator[StepReport | TaskResult]:
        """Every step that is told, then the end; raises what the worker raises."""
        told: queue.SimpleQueue[StepReport | None] = queue.SimpleQueue()
        ended = self._thread.submit(self._worker.run, task, told.put)
        ended.add_done_callback(lambda _: told.put(None))
        while (step := told.get()) is not None:
            yield step
        yield ended.result()


def _cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else psutil.cpu_count() or 1


def _logs() -> tuple[str, ...]:
    """Where Ray has this process write; told by the kernel, so that it is empty elsewhere than on Linux."""
    try:
        return tuple(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    except OSError:
        return ()
