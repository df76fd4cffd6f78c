"""Heartbeat of workers: detects hung ones by the number of blocks that they have begun.

A step may take minutes, and a worker that no peer waits for can hang without an error anywhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from ..transport.pool import WorkerHandle

EVERY_S = 5.0
"""Longest interval between two polls of a worker, in seconds."""
OPENING_S = 120.0
"""Additional time before the first block of a task, in which a worker opens files and allocates buffers."""
SLOWER = 10.0
"""Factor: the time between two signs of life may be this many times the slowest step so far, in addition to the limit.

The end of a task, after its last block, is such a time.
"""


def silence_limit(timeout_s: float, *, begun: bool, slowest_s: float = 0.0) -> float:
    """Return the seconds without a sign of life after which workers count as hung.

    The limit is longer than `timeout_s`, so that workers that wait for a hung peer report it first.

    Args:
        timeout_s: how long workers wait for each other; longer than their slowest block.
        begun: one of them has begun a block of its task.
        slowest_s: duration of their slowest step so far.
    """
    return 2 * timeout_s + (SLOWER * slowest_s if begun else OPENING_S)


class Heartbeat:
    """Signs of life of some workers since its creation. No method blocks; not thread-safe.

    Args:
        timeout_s: see `silence_limit`.
    """

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float) -> None:
        self._workers, self._every_s = workers, min(EVERY_S, timeout_s / 2)
        self._requests: list[Future[int] | None] = [None] * len(workers)
        self._counts: list[int | None] = [None] * len(workers)
        self._requested_s = self._last_sign_s = time.monotonic()
        self.begun = False
        """True after the first sign of life."""

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life of any worker."""
        return time.monotonic() - self._last_sign_s

    def record_sign(self) -> None:
        """Record a sign of life, for example a report of a step."""
        self.begun, self._last_sign_s = True, time.monotonic()

    def poll(self) -> None:
        """Take the counts that have arrived, and request new ones if the interval is over."""
        for place, request in enumerate(self._requests):
            if request is not None and request.done():
                self._requests[place] = None
                if request.exception() is None:
                    self._take(place, request.result())
        if time.monotonic() - self._requested_s < self._every_s:
            return
        self._requested_s = time.monotonic()
        for place, worker in enumerate(self._workers):
            # A worker that does not answer gets no second request: they would pile up in its transport.
            self._requests[place] = self._requests[place] or worker.call("blocks_begun")

    def _take(self, place: int, count: int) -> None:
        before, self._counts[place] = self._counts[place], count
        # The first count is only a starting point: the blocks may belong to an earlier task.
        if before not in (None, count):
            self.record_sign()
