"""Whether workers go on: they are asked now and then how many blocks they have begun.

Steps may take minutes, and a worker that has nobody waiting for it in a vote is missed by nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from ..transport.pool import WorkerHandle

EVERY_S = 5.0
"""How often they are asked, at most."""
OPENING_S = 120.0
"""What a worker may take before its first block, beside what it may be silent: it opens files and makes buffers."""
SLOWER = 10.0
"""So many times the slowest step so far may lie between two signs, after the last block of a task for example."""


def silence_limit(timeout_s: float, *, begun: bool, slowest_s: float = 0.0) -> float:
    """After how many seconds without a sign workers count as hung; later than those say so who wait for each other.

    Args:
        timeout_s: how long workers wait for each other; longer than their slowest block.
        begun: whether one of them has begun a block of what it was given.
        slowest_s: their slowest step so far.
    """
    return 2 * timeout_s + (SLOWER * slowest_s if begun else OPENING_S)


class Heartbeat:
    """The signs of some workers from now on. Nothing here blocks; not thread-safe.

    Args:
        timeout_s: as of `silence_limit`.
    """

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float) -> None:
        self._workers, self._every_s = workers, min(EVERY_S, timeout_s / 2)
        self._asked: list[Future[int] | None] = [None] * len(workers)
        self._counts: list[int | None] = [None] * len(workers)
        self._asked_s = self._heard_s = time.monotonic()
        self.begun = False
        """Whether anything was heard of them."""

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of any of them."""
        return time.monotonic() - self._heard_s

    def heard(self) -> None:
        """One of them has said something by itself."""
        self.begun, self._heard_s = True, time.monotonic()

    def look(self) -> None:
        """Take the answers that have come, and ask anew where it is time."""
        for place, answer in enumerate(self._asked):
            if answer is not None and answer.done():
                self._asked[place] = None
                if answer.exception() is None:
                    self._take(place, answer.result())
        if time.monotonic() - self._asked_s < self._every_s:
            return
        self._asked_s = time.monotonic()
        for place, worker in enumerate(self._workers):
            # Of one that does not answer, nothing more is asked.
            self._asked[place] = self._asked[place] or worker.ask("pulse")

    def _take(self, place: int, count: int) -> None:
        before, self._counts[place] = self._counts[place], count
        if before not in (None, count):
            self.heard()
