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


class Heartbeat:
    """Signs of life of some workers since its creation. No method blocks; not thread-safe.

    Args:
        timeout_s: how long workers wait for each other; longer than their slowest block.
    """

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float) -> None:
        self._workers, self._timeout_s, self._every_s = workers, timeout_s, min(EVERY_S, timeout_s / 2)
        self._requests: list[Future[int] | None] = [None] * len(workers)
        self._counts: list[int | None] = [None] * len(workers)
        self._requested_s = self._last_sign_s = time.monotonic()
        self._slowest_s: float | None = None
        """Duration of the slowest step so far; None before the first sign of life."""

    @property
    def limit_s(self) -> float:
        """Seconds without a sign of life after which the workers count as hung.

        The limit is longer than the timeout, so that workers that wait for a hung peer report it first.
        """
        return 2 * self._timeout_s + (OPENING_S if self._slowest_s is None else SLOWER * self._slowest_s)

    def record_sign(self, step_s: float = 0.0) -> None:
        """Record a sign of life, for example the report of a step that took `step_s`."""
        self._slowest_s, self._last_sign_s = max(self._slowest_s or 0.0, step_s), time.monotonic()

    def is_overdue(self) -> bool:
        """Poll the workers, and return True after a silence of all of them for longer than `limit_s`."""
        for place, request in enumerate(self._requests):
            if request is not None and request.done():
                self._requests[place] = None
                if request.exception() is None:
                    before, self._counts[place] = self._counts[place], request.result()
                    # The first count is only a starting point: the blocks may belong to an earlier task.
                    if before not in (None, request.result()):
                        self.record_sign()
        if time.monotonic() - self._requested_s >= self._every_s:
            self._requested_s = time.monotonic()
            for place, worker in enumerate(self._workers):
                # A worker that does not answer gets no second request: they would pile up in its transport.
                self._requests[place] = self._requests[place] or worker.call("blocks_begun")
        return time.monotonic() - self._last_sign_s > self.limit_s
