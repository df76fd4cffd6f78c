"""What the computing thread and the fetch thread of one run know of each other.

Two counters and a stop flag behind one condition. The computing thread waits until a fetch is *issued*, never until
its bytes have arrived; the fetch thread waits until a visit was *given to the device*, never until it has finished.
On the device order is by events (`cuda_streams.py`), and waiting on one that was not recorded yet is no wait at all.
"""

from __future__ import annotations

import threading


class RunStopped(Exception):
    """The run ended while the fetch thread still had work; it leaves quietly."""


class RunProgress:
    """Counters of one run. `issued` fetches and `released` visits only ever grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued = 0
        self._released = 0
        self._stopped = False

    def note_issued(self) -> None:
        """The next fetch of the program was issued (fetch thread)."""
        with self._changed:
            self._issued += 1
            self._changed.notify_all()

    def note_released(self) -> None:
        """The next visit of the program was given to the device (computing thread)."""
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits any more: the run is over, or one side has failed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def await_issued(self, fetch: int) -> None:
        """Wait until fetch number `fetch` was issued (computing thread).

        Raises:
            RunStopped: the fetch thread ended before it.
        """
        if self._issued > fetch:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._issued > fetch or self._stopped)
            if self._issued <= fetch:
                raise RunStopped

    def await_released(self, visit: int) -> None:
        """Wait until visit number `visit` was given to the device (fetch thread); -1 is before the run.

        Raises:
            RunStopped: the run is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._released > visit or self._stopped)
            if self._stopped:
                raise RunStopped
