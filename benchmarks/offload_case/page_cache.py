"""Cold files: out of the page cache, and the proof that they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(files: Iterable[Path]) -> None:
    """Make the next read of each file come from the disk. What another process has mapped may stay."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(files: Iterable[Path]) -> int:
    """Bytes of these files that lie in the page cache now."""
    return sum(_cached_pages(file) for file in files) * mmap.PAGESIZE


def _cached_pages(file: Path) -> int:
    size = file.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = (ctypes.c_char * size).from_buffer(mapped)
        states = (ctypes.c_ubyte * pages)()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states)
        del start  # a mapping that is still looked at cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        return len(states) - bytes(states).count(0)
