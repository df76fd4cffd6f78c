"""File reader: several threads read file pieces into memory, directly or through the page cache."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..core.pages import host_bytes, map_memory
from ..formats.safetensors_header import FileVersion
from .base import ReadThreads, SourceError
from .read_plan import (
    ALIGNMENT,
    EXTENT_BYTES,
    O_DIRECT,
    DirectExtent,
    Read,
    ReadPiece,
    direct_extents,
)

HAS_PREADV = hasattr(os, "preadv")


class OpenFiles:
    """Open files by path. Any thread may call.

    Args:
        flags: additional flags for opening a file.
        positional: read with `preadv`, which takes the position as an argument, so all threads
            share one handle. Otherwise, for systems without it, every thread has its own handle,
            because a handle has one position.
    """

    def __init__(self, flags: int = 0, *, positional: bool = True) -> None:
        self._flags = flags
        self._positional = positional
        self._lock = threading.Lock()
        self._handles: dict[tuple[Path, int], FileIO] = {}
        weakref.finalize(self, _close_all, self._handles)  # for an engine dropped without `close`

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        """Read up to `len(into)` bytes and return their number. 0 at the file end."""
        handle = self._handle(path)
        if self._positional:
            # `pread` would return new bytes for each call, to be copied once more.
            return os.preadv(handle.fileno(), [into], position)
        handle.seek(position)
        return handle.readinto(into) or 0

    def version(self, path: Path) -> FileVersion:
        """Return the current version of a file already read by this thread."""
        return FileVersion.of(os.fstat(self._handle(path).fileno()))

    def close(self) -> None:
        """Close all files. No read may be in progress."""
        with self._lock:
            _close_all(self._handles)

    def _handle(self, path: Path) -> FileIO:
        key = (path, 0 if self._positional else threading.get_ident())
        with self._lock:
            if key not in self._handles:
                self._handles[key] = FileIO(
                    path, opener=lambda name, flags: os.open(name, flags | self._flags)
                )
            return self._handles[key]


def _close_all(handles: dict[tuple[Path, int], FileIO]) -> None:
    while handles:
        handles.popitem()[1].close()


logger = logging.getLogger(__name__)

HAS_DIRECT = HAS_PREADV and O_DIRECT != 0

MOUNTS = Path("/proc/self/mountinfo")
"""Mounts in this process, one per line. Linux only."""

IN_RAM = ("tmpfs", "ramfs", "devtmpfs")


def lies_in_ram(path: Path) -> bool:
    """Return True if the file system is in RAM. False if the system does not report it."""
    try:
        device = path.stat().st_dev
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        # Any number of optional fields may stand before the hyphen.
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number:
            return kind.split()[0] in IN_RAM
    return False


class FileReader:
    """Reader threads and their open files. The first read starts them, `close` ends them.

    Args:
        readers: number of threads. 0: the thread calling `read` does the reading, and no other may
            close the reader meanwhile.
        portable: use one file handle per thread with seek and read, as on systems without `preadv`.
        direct: read past the page cache if the system and the file system support it. Each thread
            then has a bounce buffer of `extent_bytes`.
        extent_bytes: largest direct read.

    Attributes:
        direct: True if files are read past the page cache, unless their file system refuses.
        files: open files for reads through the page cache.
        direct_files: files for direct reads.
        bytes_read: bytes read from files so far, including bytes between wanted ones in direct
            reads.
        bounces: bounce buffer of each thread.

    Raises:
        ValueError: `readers` is less than 0.
    """

    def __init__(
        self,
        *,
        readers: int = 4,
        portable: bool = not HAS_PREADV,
        direct: bool = False,
        extent_bytes: int = EXTENT_BYTES,
    ) -> None:
        self.direct = direct and HAS_DIRECT and not portable
        self.bytes_read = 0
        start = partial(ThreadPoolExecutor, thread_name_prefix="wanstream-read")
        self._threads = ReadThreads(readers, start) if readers else None
        self.files = OpenFiles(positional=not portable)
        self.direct_files = OpenFiles(O_DIRECT)
        self._extent_bytes = extent_bytes
        self._not_directly: set[Path] = set()
        self.bounces: dict[int, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def read(self, reads: Iterable[Read]) -> None:
        """Read all pieces into their memory.

        Raises:
            SourceError: a piece could not be read, or the file has another version than the piece.
                The memory contents are then undefined. The reader can be used again.
        """
        direct = list[Read]()
        cached = list[Read]()
        for read in reads:
            if self.direct and read[0].path not in self._not_directly:
                direct.append(read)
            else:
                cached.append(read)
        extents = direct_extents(direct, extent_bytes=self._extent_bytes)
        tasks = [
            *(partial(self._read_extent, extent) for extent in extents),
            *(partial(self._read_piece, *read) for read in cached),
        ]
        if self._threads is not None:
            self._threads.run(tasks)
            return
        for task in tasks:
            task()

    def close(self) -> None:
        """Wait for reads in progress, stop the threads, close the files, free bounce buffers."""
        if self._threads is not None:
            self._threads.close()
        self.files.close()
        self.direct_files.close()
        self.bounces.clear()

    def _read_piece(self, piece: ReadPiece, memory: memoryview) -> None:
        into = memory[piece.target : piece.target + piece.nbytes]
        self._fill(self.files, piece, into, wanted=piece.nbytes)

    def _read_extent(self, extent: DirectExtent) -> None:
        bounce = self._bounce()
        try:
            into = bounce.data[: extent.span.nbytes]
            self._fill(self.direct_files, extent.span, into, wanted=extent.wanted, step=ALIGNMENT)
        except _RefusedDirectlyError as err:
            self._disable_direct(extent.span.path, err)
            for piece, memory in extent.parts:
                self._read_piece(piece, memory)
            return
        for piece, memory in extent.parts:
            start = piece.offset - extent.span.offset
            # numpy releases the GIL while it copies, and copies on this thread only.
            target = np.frombuffer(memory, np.uint8, piece.nbytes, piece.target)
            np.copyto(target, bounce[start : start + piece.nbytes])

    def _fill(
        self, files: OpenFiles, piece: ReadPiece, into: memoryview, *, wanted: int, step: int = 1
    ) -> None:
        """Read until `wanted` bytes have arrived. Every read starts at a multiple of `step`."""
        done = 0
        while done < wanted:
            position = piece.offset + done
            try:
                count = files.read_at(piece.path, position, into[done:])
            except OSError as err:
                if err.errno == errno.EINVAL and files is self.direct_files:
                    raise _RefusedDirectlyError(err.strerror) from err
                reason = err.strerror or str(err)
                if isinstance(err, FileNotFoundError):
                    reason += ": put the file back, or choose another one where it is loaded"
                raise _error(piece, position, reason) from err
            with self._lock:
                self.bytes_read += count
            # A direct read may end early at any byte, but the next one has to start at a multiple
            # of `step` again.
            reached = done + count
            if reached < wanted:
                reached -= reached % step
            if reached == done:
                reason = "the file ends here, it was changed after it was opened"
                raise _error(piece, position + count, reason)
            done = reached
        # Checked after the read, to notice changes while the file is read.
        if piece.version not in (None, files.version(piece.path)):
            reason = "the file was changed after it was opened; open it again"
            raise _error(piece, piece.offset, reason)

    def _bounce(self) -> npt.NDArray[np.uint8]:
        thread = threading.get_ident()
        if thread not in self.bounces:
            self.bounces[thread] = host_bytes(map_memory(self._extent_bytes))
        return self.bounces[thread]

    def _disable_direct(self, path: Path, err: OSError) -> None:
        with self._lock:
            first = not self._not_directly
            self._not_directly.add(path)
        if first:
            refusal = (
                "%s: the file system refuses direct reads (%s); reading through the page cache"
            )
            logger.info(refusal, path, err)


class _RefusedDirectlyError(OSError):
    """The file system refuses reads past the page cache."""


def _error(piece: ReadPiece, position: int, reason: str) -> SourceError:
    names = ", ".join(piece.names)
    return SourceError(f"{piece.path}: reading {names} at byte {position} failed: {reason}")
