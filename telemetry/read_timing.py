"""Times of the reading of each block."""

from __future__ import annotations

from typing import NamedTuple


class ReadSpan(NamedTuple):
    """One reading of one block. Times are values of `time.perf_counter()`."""

    began: float
    ended: float
    nbytes: int
    """Bytes that the file was asked for."""
    straight: bool
    """True if they went straight into a buffer, not into RAM."""
