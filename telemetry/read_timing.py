"""Timing of block reads."""

from __future__ import annotations

from typing import NamedTuple


class ReadSpan(NamedTuple):
    """One read of one block. Times are values of `time.perf_counter()`."""

    start: float
    end: float
    nbytes: int
    """Bytes that were requested from the file."""
    straight: bool
    """True for a read directly into a buffer, False for a read into a RAM slot."""
