"""How long the reading of each block took, and how much of it the page cache gave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .nvtx import Ranges, ranged


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


class DiskCounter(Protocol):
    """Counts what disks gave."""

    def read_bytes(self) -> int | None:
        """Bytes that disks have given to this process so far; None where nobody counts."""

    def close(self) -> None:
        """Nobody asks any more. Closing twice is allowed."""


class KernelCounter:
    """What the Linux kernel counts; opened when it is first asked."""

    def __init__(self, path: str = "/proc/self/io") -> None:
        self._path = path
        self._file: int | None = None
        self._opened = False

    def read_bytes(self) -> int | None:
        if not self._opened:
            self._opened, self._file = True, _open(self._path)
        if self._file is None:
            return None
        _, _, rest = os.pread(self._file, 512, 0).partition(b"\nread_bytes: ")
        return int(rest.partition(b"\n")[0])

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class ReadMeter:
    """Measures readings, also two side by side; use with `with` or `close` it.

    What disks have given to this process tells the page cache's part. File systems for which the kernel counts nothing
    (some network ones) look like one big cache.
    """

    def __init__(self, ranges: Ranges | None = None, *, counter: DiskCounter | None = None) -> None:
        self.spent_s = 0.0
        """Seconds that measuring took beside the reading."""
        self._ranges = ranges
        self._counter: DiskCounter = counter or KernelCounter()
        self._lock = threading.Lock()
        self._under_way = 0
        self._seen: int | None = None
        self._fresh = 0
        """Bytes from disks that no reading was charged with yet: readahead, and those of a reading beside."""

    def measure(self, read: Callable[[], None], nbytes: int, *, name: str, straight: bool = False) -> ReadSpan:
        """Call `read`, which asks a file for `nbytes`; raises what it raises."""
        entered = time.perf_counter()
        with self._lock:
            if self._under_way == 0:
                self._seen = self._counter.read_bytes()
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
        self._counter.close()

    def _charge(self, nbytes: int) -> int | None:
        """The page cache's part of a reading that has ended."""
        with self._lock:
            self._under_way -= 1
            counted = self._counter.read_bytes()
            if counted is None or self._seen is None:
                return None
            self._fresh += counted - self._seen
            self._seen = counted
            from_disk = min(self._fresh, nbytes)
            self._fresh -= from_disk
            return nbytes - from_disk

    def __enter__(self) -> ReadMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None
