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

from ..formats.layout import host_bytes
from ..formats.safetensors_header import FileVersion, file_version
from ..host_memory.pages import map_memory
from .base import ReadThreads, SourceError
from .read_plan import ALIGNMENT, EXTENT_BYTES, O_DIRECT, DirectExtent, Read, ReadPiece, direct_extents

HAS_PREADV = hasattr(os, "preadv")


class Files:
    """Open files by path. Methods may be called from any thread.

    Args:
        flags: additional flags for opening a file.
        positional: read by `preadv`, which takes the position as an argument, so that all threads share one handle.
            Otherwise, for systems without it, every thread has its own handle, because a handle has one position.
    """

    def __init__(self, flags: int = 0, *, positional: bool = True) -> None:
        self._flags, self._positional = flags, positional
        self._lock = threading.Lock()
        self._handles: dict[tuple[Path, int], FileIO] = {}
        weakref.finalize(self, _close_all, self._handles)  # for an engine dropped without `close`

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        """Read up to `len(into)` bytes and return their number. 0 at the file end."""
        handle = self._handle(path)
        if self._positional:
            return os.preadv(handle.fileno(), [into], position)
        handle.seek(position)
        return handle.readinto(into) or 0

    def version(self, path: Path) -> FileVersion:
        """Return the current version of a file already read by this thread."""
        return file_version(os.fstat(self._handle(path).fileno()))

    def close(self) -> None:
        """Close all files. No read may be in progress."""
        with self._lock:
            _close_all(self._handles)

    def _handle(self, path: Path) -> FileIO:
        key = (path, 0 if self._positional else threading.get_ident())
        with self._lock:
            if key not in self._handles:
                self._handles[key] = FileIO(path, opener=lambda name, flags: os.open(name, flags | self._flags))
            return self._handles[key]


def _close_all(handles: dict[tuple[Path, int], FileIO]) -> None:
    while handles:
        handles.popitem()[1].close()


logger = logging.getLogger(__name__)

HAS_DIRECT = HAS_PREADV and O_DIRECT != 0

MOUNTS = Path("/proc/self/mountinfo")
"""Mounts in this process, one a line. Linux only."""

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
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number:
            return kind.split()[0] in IN_RAM
    return False


class FileReader:
    """Reader threads and their open files. The first read starts them, `close` ends them.

    Args:
        readers: number of threads. 0: the thread that calls `read` reads, and no other may close the reader meanwhile.
        portable: use one file handle per thread with seek and read, as on systems without `preadv`.
        direct: read past the page cache if the system and the file system support it. Each thread then has a bounce
            buffer of `extent_bytes`.
        files: files for reads through the page cache. None: chosen by `portable`.
        direct_files: files for direct reads.
        extent_bytes: largest direct read.

    Attributes:
        direct: True if files are read past the page cache, unless their file system refuses.
        bytes_read: bytes read from files so far, including bytes between wanted ones in direct reads.
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
        files: Files | None = None,
        direct_files: Files | None = None,
        extent_bytes: int = EXTENT_BYTES,
    ) -> None:
        self.direct = direct and HAS_DIRECT and not portable
        self.bytes_read = 0
        start = partial(ThreadPoolExecutor, thread_name_prefix="wanstream-read")
        self._threads = ReadThreads(readers, start) if readers else None
        self._files = files or Files(positional=not portable)
        self._direct_files = direct_files or Files(O_DIRECT)
        self._extent_bytes = extent_bytes
        self._not_directly: set[Path] = set()
        self.bounces: dict[int, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def read(self, reads: Iterable[Read]) -> None:
        """Read all pieces into their memory.

        Raises:
            SourceError: a piece could not be read, or the file has another version than the piece. The memory contents
                are then undefined. The reader can be used again.
        """
        direct, cached = list[Read](), list[Read]()
        for read in reads:
            (direct if self.direct and read[0].path not in self._not_directly else cached).append(read)
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
        """Wait for reads in progress, then stop the threads, close the files and free the bounce buffers."""
        if self._threads is not None:
            self._threads.close()
        self._files.close()
        self._direct_files.close()
        self.bounces.clear()

    def _read_piece(self, piece: ReadPiece, memory: memoryview) -> None:
        self._fill(self._files, piece, memory[piece.target : piece.target + piece.nbytes], wanted=piece.nbytes)

    def _read_extent(self, extent: DirectExtent) -> None:
        bounce = self._bounce()
        try:
            self._fill(
                self._direct_files, extent.span, bounce.data[: extent.span.nbytes], wanted=extent.wanted, step=ALIGNMENT
            )
        except _RefusedDirectlyError as err:
            self._disable_direct(extent.span.path, err)
            for piece, memory in extent.parts:
                self._read_piece(piece, memory)
            return
        for piece, memory in extent.parts:
            start = piece.offset - extent.span.offset
            # numpy releases the GIL while it copies, and copies on this thread only.
            np.copyto(np.frombuffer(memory, np.uint8, piece.nbytes, piece.target), bounce[start : start + piece.nbytes])

    def _fill(self, files: Files, piece: ReadPiece, into: memoryview, *, wanted: int, step: int = 1) -> None:
        """Read until `wanted` bytes have arrived. Every read starts at a multiple of `step`."""
        done = 0
        while done < wanted:
            position = piece.offset + done
            try:
                count = files.read_at(piece.path, position, into[done:])
            except OSError as err:
                if err.errno == errno.EINVAL and files is self._direct_files:
                    raise _RefusedDirectlyError(err.strerror) from err
                reason = err.strerror or str(err)
                if isinstance(err, FileNotFoundError):
                    reason += ": put the file back, or choose another one where it is loaded"
                raise SourceError(_message(piece, position, reason)) from err
            with self._lock:
                self.bytes_read += count
            # A direct read may end early at any byte, but the next one has to start at a multiple of `step` again.
            reached = done + count if done + count >= wanted else (done + count) // step * step
            if reached == done:
                raise SourceError(
                    _message(piece, position + count, "the file ends here, it was changed after it was opened")
                )
            done = reached
        # Checked after the read, to notice changes while the file is read.
        if piece.version not in (None, files.version(piece.path)):
            raise SourceError(_message(piece, piece.offset, "the file was changed after it was opened; open it again"))

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
            logger.info("%s: the file system refuses direct reads (%s); reading through the page cache", path, err)


class _RefusedDirectlyError(OSError):
    """The file system refuses to read past the page cache."""


def _message(piece: ReadPiece, position: int, reason: str) -> str:
    return f"{piece.path}: reading {', '.join(piece.names)} at byte {position} failed: {reason}"
