"""Host workers, started once per reference."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TypeAlias

import torch

from ...devices import runtime_for
from ...distributed import (
    Driver,
    InProcessPool,
    Pool,
    RayMissingError,
    RayPool,
    WorkerLostError,
    check_token_file,
)
from ...schema import Mesh
from ...schema.refs import GOALS, IN_PROCESS, WorkersRef

StartPool: TypeAlias = Callable[[WorkersRef, torch.device], Pool]

RELEASE_TIMEOUT_S = 60.0
"""Seconds for workers to release memory. Slower ones are killed, which releases it too."""

logger = logging.getLogger("wanstream.workers")


def check_ray(ref: WorkersRef) -> None:
    """Raise RayMissingError if `ref` needs Ray but Ray is not installed.

    Raises RaySetupError for an unusable token file.

    Does not import Ray.
    """
    if ref.address != IN_PROCESS and find_spec("ray") is None:
        raise RayMissingError
    if ref.token_file:
        check_token_file(ref.token_file)


def gpus_of(device: torch.device) -> int | None:
    """Return the number of GPUs for workers on this machine, or None if `device` is a CPU."""
    runtime = runtime_for(device)
    return None if runtime is None else runtime.count()


def start_pool(ref: WorkersRef, device: torch.device) -> Pool:
    """Start the workers named by `ref` on devices of the same type as `device`.

    Blocks until all are ready.
    """
    if ref.address == IN_PROCESS:
        return InProcessPool(str(device))
    return RayPool(ref, device.type)


@dataclass(kw_only=True)
class _StartedWorkers:
    ref: WorkersRef
    device: torch.device
    pool: Pool
    driver: Driver | None = None


class WorkerRegistry:
    """Registry with at most one set of workers, by value.

    Thread-safe. The workers end with this process.

    Args:
        start: starts the workers named by a reference.
    """

    def __init__(self, start: StartPool = start_pool) -> None:
        self._start = start
        # Reentrant, because `_running` calls `close`.
        self._lock = threading.RLock()
        self._entry: _StartedWorkers | None = None

    def get(self, ref: WorkersRef, mesh: Mesh, device: torch.device) -> Driver:
        """Return the workers named by `ref` with layout `mesh`, starting them if necessary.

        References that differ only in layout, goal and `max_restarts` share processes. Other
        workers are ended first, so that no two sets share a device.

        Raises RayMissingError, and the errors from starting workers.
        """
        with self._lock:
            # The layout decides which workers share a machine. A later one does not move them,
            # because this would restart them. The sampler's text reports groups that are apart.
            entry = self._running(replace(ref, mesh=mesh), device)
            if entry.driver is None or (entry.driver.ref, entry.driver.mesh) != (ref, mesh):
                entry.driver = Driver(entry.pool, ref, mesh, follows=entry.driver)
            return entry.driver

    def pool(self, ref: WorkersRef, device: torch.device) -> Pool:
        """Return the workers named by `ref` without a layout. Otherwise as `get`."""
        with self._lock:
            return self._running(ref, device).pool

    def release_memory(self) -> bool:
        """Release the workers' weights.

        The processes stay alive and open the experts again in the next run.

        A worker that does not respond in time is killed, and replaced in the next run. During a
        run, nothing is released and the result is False.
        """
        with self._lock:
            entry = self._entry
            if entry is None:
                return True
            if entry.driver is not None and entry.driver.is_running:
                return False
            # All calls are sent before the wait, so the workers release memory in parallel.
            requests = {worker.call("close"): worker for worker in entry.pool.workers}
            done, late = wait(requests, timeout=RELEASE_TIMEOUT_S)
            for request in late:
                logger.warning(
                    "worker %d has not released its memory in %g s: killing it",
                    requests[request].rank,
                    RELEASE_TIMEOUT_S,
                )
                requests[request].kill()
            for request in done:
                with suppress(WorkerLostError):  # a dead worker has no memory to release
                    request.result()
            return True

    def close(self) -> None:
        """End the workers, if any."""
        with self._lock:
            entry = self._entry
            self._entry = None
            if entry is not None:
                atexit.unregister(self.close)
                entry.pool.close()

    def _running(self, ref: WorkersRef, device: torch.device) -> _StartedWorkers:
        check_ray(ref)
        # Without settings that affect only a run, not the processes.
        key = replace(ref, mesh=None, goal=GOALS[0], max_restarts=0)
        entry = self._entry
        if entry is not None and (entry.ref, entry.device) == (key, device) and entry.pool.usable:
            return entry
        # First, because old and new workers would not fit on the same devices together.
        self.close()
        self._entry = entry = _StartedWorkers(ref=key, device=device, pool=self._start(ref, device))
        atexit.register(self.close)
        return entry
