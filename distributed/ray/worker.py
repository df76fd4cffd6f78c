"""Worker in a process started by Ray. `actor.py` imports it there, by name."""

from __future__ import annotations

import os
import pkgutil
import uuid
from typing import Any

from ...devices import core_count
from ..worker.worker import Worker
from .actor import PACKAGE, RestartedError, Service, Started
from .environment import import_ray


class RayWorker(Worker):
    """Worker in a process started by Ray.

    Args:
        threads: CPU threads for compute; None: the machine's cores divided by `workers_on_machine`.
        workers_on_machine: number of workers on this machine.
        service: the service behind `serve`, or None.
    """

    def __init__(
        self, *, threads: int | None, workers_on_machine: int, service: Service | None
    ) -> None:
        ray = import_ray()
        super().__init__(
            "cuda:0" if ray.get_gpu_ids() else "cpu",
            address=ray.util.get_node_ip_address(),
            # Not the host name: cloned machines may share one.
            machine=str(ray.get_runtime_context().get_node_id()),
            threads=threads or max(1, core_count() // workers_on_machine),
        )
        # Not the process id, because a machine reuses them.
        self._process = uuid.uuid4().hex
        self._service: Any = None
        if service is not None:
            path, settings = service
            make = pkgutil.resolve_name(f"{PACKAGE}.{path}")
            self._service = make(self.facts().device, workers_on_machine, **settings)

    def started(self) -> Started:
        """Return this worker's facts and log files."""
        return Started(
            facts=self.facts(),
            logs=_logs(),
            requires_token=os.environ.get("RAY_AUTH_MODE") == "token",
            process=self._process,
        )

    def serve(self, process: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a service method. Raises RestartedError if `process` is another process."""
        if process != self._process:
            raise RestartedError
        return getattr(self._service, method)(*args)


def _logs() -> tuple[str, ...]:
    """Return the files for stdout and stderr, as set up by Ray; empty except on Linux."""
    try:
        return tuple(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    except OSError:
        return ()
