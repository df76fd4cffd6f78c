"""Times of the reading of each block."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .nvtx import Ranges, ranged


class ReadSpan(NamedTuple):
    """One reading of one block. Times are values of `time.perf_counter()`."""

    began: float
    ended: float
    nbytes: int
    """Bytes that the file was requested for."""
    straight: bool
    """True if they went straight into a buffer, not into RAM."""


class ReadTimer:
    """Measures readings, from any thread; `ranges` names them for a profiler."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        self._ranges = ranges

    def measure(self, read: Callable[[], None], nbytes: int, *, name: str, straight: bool = False) -> ReadSpan:
        """Call `read`, which reads `nbytes` from a file; raises what it raises."""
        began = time.perf_counter()
        with ranged(self._ranges, name):
            read()
        return ReadSpan(began, time.perf_counter(), nbytes, straight)
