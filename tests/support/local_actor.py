"""Actor whose service is in this process, on threads; it can be killed, and is restarted as Ray would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from wanstream.cli.batch.actors.ray_backend import RayBackend
from wanstream.cli.batch.actors.row_service import RowService
from wanstream.cli.options import BatchOptions
from wanstream.distributed import WorkerLostError

PLAIN = (str, int, float, bool, bytes, type(None))
MARK = "mark"


def is_plain(value: object) -> bool:
    """Return True for values that a process can unpickle before it has imported the pack."""
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return isinstance(value, PLAIN)


class LocalActor:
    """See `Actor`. A killed one does not answer `down` calls; then it has a new service without workflows."""

    def __init__(self, make: Callable[[], RowService], rank: int = 0, *, down: int = 2) -> None:
        self._make, self.rank, self._down = make, rank, down
        self.service = make()
        self.calls: list[str] = []
        self.restarts, self._lost = 0, 0
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End the process; its thread goes on for a moment, as one on a machine that is cut off."""
        with self._lock:
            if not self._lost:
                service, self._lost = self.service, self._down
                threading.Thread(target=service.stop, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Return what the worker of the process returns."""
        future: Future[Any] = Future()
        future.set_result(method)
        return future

    def serve(self, method: str, *args: Any) -> Future[Any]:
        """See `Actor.serve`."""
        assert is_plain(args), (method, args)
        future: Future[Any] = Future()
        with self._lock:
            self.calls.append(method)
            if self._lost:
                self._lost -= 1
                if not self._lost:
                    self.service = self._make()
                future.set_exception(WorkerLostError(f"worker {self.rank} is gone", self.rank))
                return future
            service = self.service
        try:
            future.set_result(getattr(service, method)(*args))
        except Exception as err:  # noqa: BLE001 - the future raises it
            future.set_exception(err)
        return future

    def restarted(self, started: Any) -> None:
        """See `Actor.restarted`."""
        assert started == "started"
        self.restarts += 1


def row_service(options: BatchOptions, workflow: Any, output: Path) -> Callable[[], RowService]:
    """Return the constructor of a service whose hosts save in `output`, if its machine has that folder."""
    settings = {"strict": False, "models": str(options.models), "input": str(options.input)}
    return lambda: RowService("cpu", workflow=workflow, **settings, output=str(output), mark=MARK)


def local_backend(actor: LocalActor, options: BatchOptions) -> RayBackend:
    """Return the backend of an actor."""
    return RayBackend(actor, options, {}, MARK, lambda _: None)
