"""Timing of block reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .nvtx import Ranges, ranged


class ReadSpan(NamedTuple):
    """One read of one block. Times are values of `time.perf_counter()`."""

    start: float
    end: float
    nbytes: int
    """Bytes that were requested from the file."""
    straight: bool
    """True for a read directly into a buffer, False for a read into a RAM slot."""


class ReadTimer:
    """Measures reads, from any thread; `ranges` shows them in a profiler."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        self._ranges = ranges

    def measure(self, read: Callable[[], None], nbytes: int, *, name: str, straight: bool = False) -> ReadSpan:
        """Call `read`, which reads `nbytes` from a file, and return its times. Exceptions of `read` pass through."""
        start = time.perf_counter()
        with ranged(self._ranges, name):
            read()
        return ReadSpan(start, time.perf_counter(), nbytes, straight)
