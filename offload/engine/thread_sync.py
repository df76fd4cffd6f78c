"""What two threads of one run know of each other: one that brings blocks, and one that uses them.

Two sets of numbers and two flags behind one condition. On the device the computing thread waits until a fetch is
*issued*, never until its bytes have arrived; the fetch thread waits until a visit was *given to the device*, never
until it has finished. Order there is by events (`cuda.py`), and waiting on one that was not recorded yet is no
wait at all. In RAM the fetch thread waits until a block was read, and the read thread until a slot was left.
"""

from __future__ import annotations

import threading


class RunStopped(Exception):
    """The run ended while a thread of it still had work; it leaves quietly."""


class ThreadSync:
    """Numbers of one program: fetches that were issued, and visits that were released. Both only ever grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._released = {-1}  # before the run
        self._no_more = False
        self._stopped = False
        self._ending = False

    def note_issued(self, fetch: int) -> None:
        """Fetch number `fetch` of the program was issued (the thread that brings blocks)."""
        with self._changed:
            self._issued.add(fetch)
            self._changed.notify_all()

    def note_released(self, visit: int) -> None:
        """Visit number `visit` of the program is over (the thread that uses blocks)."""
        with self._changed:
            self._released.add(visit)
            self._changed.notify_all()

    def no_more(self) -> None:
        """Nothing more will be issued: the thread that brings blocks has ended. What was issued is there."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits any more: the run is over."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end(self) -> None:
        """No visit will be released any more. Who waits for one leaves; what waits for none of them is still done."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def await_issued(self, fetch: int) -> None:
        """Wait until fetch number `fetch` was issued.

        Raises:
            RunStopped: it will not be.
        """
        if fetch in self._issued:
            return
        with self._changed:
            self._changed.wait_for(lambda: fetch in self._issued or self._no_more or self._stopped)
            if fetch not in self._issued:
                raise RunStopped

    def await_released(self, visit: int) -> None:
        """Wait until visit number `visit` is over; -1 is before the run.

        Raises:
            RunStopped: the run is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: visit in self._released or self._stopped or self._ending)
            if self._stopped or visit not in self._released:
                raise RunStopped
