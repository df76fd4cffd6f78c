"""Heartbeat: detects hung workers by the number of blocks they have begun.

A step may take minutes. Without a peer that waits for it, a worker can hang without an error
anywhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from ..transport.pool import WorkerHandle

EVERY_S = 5.0
"""Longest interval between two polls, in seconds."""
OPENING_S = 120.0
"""Additional time before a task's first block: the worker opens files and allocates buffers."""
SLOWER = 10.0
"""Factor on the slowest step so far. The product is added to the limit between two signs of life.

The work after a task's last block can take this long.
"""


class Heartbeat:
    """Signs of life from some workers since creation. No method blocks. Not thread-safe.

    Args:
        timeout_s: timeout between workers; longer than their slowest block.
    """

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        # At least two polls within the timeout.
        self._every_s = min(EVERY_S, timeout_s / 2)
        self._requests: list[Future[int] | None] = [None] * len(workers)
        self._counts: list[int | None] = [None] * len(workers)
        self._requested_s = self._last_sign_s = time.monotonic()
        self._slowest_s: float | None = None
        """Seconds for the slowest step so far; None before the first sign of life."""

    @property
    def limit_s(self) -> float:
        """Seconds without a sign of life before the workers count as hung.

        Longer than the timeout, because workers behind a hung peer report it first.
        """
        extra_s = OPENING_S
        if self._slowest_s is not None:
            extra_s = SLOWER * self._slowest_s
        return 2 * self._timeout_s + extra_s

    def record_sign(self, step_s: float = 0.0) -> None:
        """Record a sign of life, for example the report of a step that took `step_s`."""
        self._slowest_s = max(self._slowest_s or 0.0, step_s)
        self._last_sign_s = time.monotonic()

    def is_overdue(self) -> bool:
        """Poll the workers, and return True if all are silent for longer than `limit_s`."""
        for place, request in enumerate(self._requests):
            if request is not None and request.done():
                self._requests[place] = None
                # Errors are ignored: the task itself reports a lost worker.
                if request.exception() is None:
                    before = self._counts[place]
                    self._counts[place] = request.result()
                    # The first count is only a starting point. The blocks may belong to an earlier
                    # task.
                    if before not in (None, request.result()):
                        self.record_sign()
        if time.monotonic() - self._requested_s >= self._every_s:
            self._requested_s = time.monotonic()
            for place, worker in enumerate(self._workers):
                # No second request before the first is answered. Requests would pile up in the
                # transport.
                self._requests[place] = self._requests[place] or worker.call("blocks_begun")
        return time.monotonic() - self._last_sign_s > self.limit_s
