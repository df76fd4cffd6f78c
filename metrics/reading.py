"""How long the reading of each block took, and how much of it the page cache gave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .nvtx import Ranges, ranged

KERNEL_COUNTERS = "/proc/self/io"  # Linux only


class ReadSpan(NamedTuple):
    """One reading of one block. Times are values of `time.perf_counter()`."""

    began: float
    ended: float
    nbytes: int
    """What was asked of the file."""
    cached_bytes: int | None
    """That part of it that came from the page cache; None where the kernel does not tell."""
    straight: bool
    """Whether it went straight into a buffer, not into RAM."""


class ReadMeter:
    """Measures readings, also two side by side; use with `with` or `close` it.

    What the kernel has fetched from disks for this process tells the page cache's part. File systems for which it
    counts nothing (some network ones) look like one big cache.
    """

    def __init__(self, ranges: Ranges | None = None) -> None:
        self.spent_s = 0.0
        """Seconds that measuring took beside the reading."""
        self._ranges = ranges
        self._lock = threading.Lock()
        self._counters: int | None = None  # a descriptor, from the first reading on
        self._opened = False
        self._under_way = 0
        self._seen = 0
        self._fresh = 0
        """Bytes from disks that no reading was charged with yet: readahead, and those of a reading beside."""

    def measure(self, read: Callable[[], None], nbytes: int, *, name: str, straight: bool = False) -> ReadSpan:
        """Call `read`, which asks a file for `nbytes`; raises what it raises."""
        entered = time.perf_counter()
        with self._lock:
            if not self._opened:
                self._opened, self._counters = True, _open_counters()
            if self._under_way == 0:
                self._seen = self._from_disk()
            self._under_way += 1
        began = time.perf_counter()
        try:
            with ranged(self._ranges, name):
                read()
        finally:
            ended = time.perf_counter()
            cached = self._charge(nbytes)
        with self._lock:
            self.spent_s += began - entered + time.perf_counter() - ended
        return ReadSpan(began, ended, nbytes, cached, straight)

    def close(self) -> None:
        """No reading is under way any more, and none follows. Closing twice is allowed."""
        counters, self._counters = self._counters, None
        if counters is not None:
            os.close(counters)

    def _charge(self, nbytes: int) -> int | None:
        with self._lock:
            self._under_way -= 1
            if self._counters is None:
                return None
            counted = self._from_disk()
            self._fresh += counted - self._seen
            self._seen = counted
            from_disk = min(self._fresh, nbytes)
            self._fresh -= from_disk
            return nbytes - from_disk

    def _from_disk(self) -> int:
        if self._counters is None:
            return 0
        _, _, rest = os.pread(self._counters, 512, 0).partition(b"\nread_bytes: ")
        return int(rest.partition(b"\n")[0])

    def __enter__(self) -> ReadMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_counters() -> int | None:
    try:
        return os.open(KERNEL_COUNTERS, os.O_RDONLY)
    except OSError:
        return None
