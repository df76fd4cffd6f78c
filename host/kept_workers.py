"""Workers that are named by value: started once, and found running by the next queue item."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from ..plan import WorkersRef
from ..plan.workers_ref import IN_PROCESS

if TYPE_CHECKING:
    from ..distributed.driver import Driver

StartWorkers: TypeAlias = "Callable[[WorkersRef], Driver]"

INSTALL_RAY = 'pip install "ray>=2.48"'


class NoRayError(ValueError):
    """Workers were asked for that Ray would have to start, and Ray is not installed."""


def check_ray(ref: WorkersRef) -> None:
    """Raise NoRayError where `ref` needs Ray and there is none. Imports nothing."""
    if ref.address != IN_PROCESS and find_spec("ray") is None:
        raise NoRayError(
            f"Ray is not installed, and it starts the workers: run `{INSTALL_RAY}` with the Python that runs this "
            f"program, or set address to {IN_PROCESS!r} and count to 1"
        )


def start_workers(ref: WorkersRef) -> Driver:
    """Start the workers that `ref` names; blocks until all of them answer."""
    from ..distributed.start import start

    return start(ref)


class KeptWorkers:
    """Holds at most one set of workers, by value. Thread-safe. They end with this process, if not before.

    Args:
        start: starts the workers that a reference names.
    """

    def __init__(self, start: StartWorkers = start_workers) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._held: tuple[WorkersRef, Driver] | None = None

    def get(self, ref: WorkersRef) -> Driver:
        """The workers that `ref` names; others are ended first, so that two sets never share a device.

        Raises NoRayError, and what starting them raises.
        """
        check_ray(ref)
        with self._lock:
            if self._held is None or self._held[0] != ref or not self._held[1].usable:
                self._close()
                self._held = (ref, self._start(ref))
                atexit.register(self.close)
            return self._held[1]

    def rest(self) -> None:
        """Let them give back the memory that weights take; they stay, and open their experts again when they run."""
        with self._lock:
            if self._held is not None:
                self._held[1].rest()

    def close(self) -> None:
        """End the workers, if there are any."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            atexit.unregister(self.close)
            held[1].close()
