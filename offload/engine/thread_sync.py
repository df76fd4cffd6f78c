"""Synchronisation of two threads of a run: a producer that issues fetches and a consumer that releases visits.

Above RAM, the producer is the fetch thread and the consumer is the compute thread. The compute thread waits on the host
until a fetch is *issued*, never until its bytes have arrived; the fetch thread waits until a visit was *issued to the
device*, never until the device has finished it. Work on the device is ordered by events (`transfers/cuda.py`), but
waiting for an event that was not recorded yet has no effect. Each thread therefore waits here until the other one has
recorded its event. In RAM, the producer is the read thread and the consumer is the fetch thread.
"""

from __future__ import annotations

import threading


class RunStopped(Exception):
    """Ends a thread whose run has ended while it still had work; not an error."""


class ThreadSync:
    """Numbers of the issued fetches and released visits of one program. Both sets only grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._released = {-1}  # the visit before the first one, which a fetch may wait for
        self._no_more = False
        self._stopped = False
        self._ending = False

    def note_issued(self, fetch: int) -> None:
        """Note that fetch number `fetch` of the program was issued (producer)."""
        with self._changed:
            self._issued.add(fetch)
            self._changed.notify_all()

    def note_released(self, visit: int) -> None:
        """Note that visit number `visit` of the program was released (consumer)."""
        with self._changed:
            self._released.add(visit)
            self._changed.notify_all()

    def no_more(self) -> None:
        """Make waits for fetches that were not issued raise: the producer has failed. Issued fetches stay valid."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits: the run has ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end_visits(self) -> None:
        """Make waits for visits that were not released raise: no more visits will come.

        The producer still issues the fetches that depend on released visits only.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def await_issued(self, fetch: int) -> None:
        """Wait until fetch number `fetch` was issued.

        Raises:
            RunStopped: it will not be issued.
        """
        # Usual case, without the lock: the fetch was issued long before its visit, and the set only grows.
        if fetch in self._issued:
            return
        with self._changed:
            self._changed.wait_for(lambda: fetch in self._issued or self._no_more or self._stopped)
            if fetch not in self._issued:
                raise RunStopped

    def await_released(self, visit: int) -> None:
        """Wait until visit number `visit` was released; -1 counts as released.

        Raises:
            RunStopped: the run has ended, or the visit will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: visit in self._released or self._stopped or self._ending)
            if self._stopped or visit not in self._released:
                raise RunStopped
