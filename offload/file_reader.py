"""Reads pieces of files straight into memory with a few threads.

Reads never go through a memory map: its page faults are taken one by one on the thread that computes, its readahead
fetches what nobody asked for, and a file cut short ends the process instead of raising.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path
from typing import Protocol

from .read_pieces import ReadPiece
from .safetensors_header import FileVersion, file_version
from .source import SourceError

# A piece and the memory it is a piece of.
Read = tuple[ReadPiece, memoryview]

HAS_PREADV = hasattr(os, "preadv")


class FileReader:
    """A few reader threads and the files they have open; both start with the first read and end with `close`.

    Args:
        readers: threads that read side by side.
        portable: seek and read with a file handle of each thread's own, as on systems without `preadv`.
    """

    def __init__(self, *, readers: int = 4, portable: bool = not HAS_PREADV) -> None:
        if readers < 1:
            raise ValueError(f"{readers} reader threads cannot read: use 1 or more")
        self._readers = readers
        self._files: _Files = _SeekingFiles() if portable else _PositionalFiles()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def read(self, reads: Iterable[Read]) -> None:
        """Fill every piece's part of its memory, and return when no thread touches that memory any more.

        Raises:
            SourceError: a piece could not be read, or the file is not the version that the piece belongs to; the
                memory then holds anything, and the reader can be used again.
        """
        waiting = deque(reads)
        pool = self._started_pool()
        jobs = [pool.submit(self._drain, waiting) for _ in range(min(self._readers, len(waiting)))]
        wait(jobs)
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Let reads that are under way end, then stop the threads and close the files."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._files.close()

    def _started_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise SourceError("the source was closed; open it again to read from it")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._readers, thread_name_prefix="wanstream-read")
            return self._pool

    def _drain(self, waiting: deque[Read]) -> None:
        try:
            for piece, memory in _taken_from(waiting):
                self._read_piece(piece, memory[piece.target : piece.target + piece.nbytes])
        except SourceError:
            waiting.clear()  # nobody wants the rest
            raise

    def _read_piece(self, piece: ReadPiece, into: memoryview) -> None:
        done = 0
        while done < piece.nbytes:
            position = piece.offset + done
            try:
                count = self._files.read_at(piece.path, position, into[done:])
            except OSError as err:
                raise SourceError(_message(piece, position, err.strerror or str(err))) from err
            if count == 0:
                raise SourceError(_message(piece, position, "the file ends here, it was changed after it was opened"))
            done += count
        # Asked afterwards: a file that changed while it was read has changed too.
        if piece.version not in (None, self._files.version(piece.path)):
            raise SourceError(_message(piece, piece.offset, "the file was changed after it was opened; open it again"))


def _taken_from(waiting: deque[Read]) -> Iterator[Read]:
    while waiting:
        try:
            yield waiting.popleft()
        except IndexError:  # another thread took the last one
            return


class _Files(Protocol):
    """Files that are opened when they are first read."""

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        """Read up to `len(into)` bytes and return how many; 0 at the end of the file. Safe to call from any thread."""
        ...

    def version(self, path: Path) -> FileVersion:
        """Return the present version of a file that this thread has read."""
        ...

    def close(self) -> None: ...


class _PositionalFiles:
    """One descriptor per file, shared by all threads: `preadv` takes the position with the call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        return os.preadv(self._descriptor(path), [into], position)

    def version(self, path: Path) -> FileVersion:
        return file_version(os.fstat(self._descriptor(path)))

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]


class _SeekingFiles:
    """One handle per file and thread, because a handle has one position."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[tuple[Path, int], FileIO] = {}

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        handle = self._handle(path)
        handle.seek(position)
        return handle.readinto(into) or 0

    def version(self, path: Path) -> FileVersion:
        return file_version(os.fstat(self._handle(path).fileno()))

    def close(self) -> None:
        with self._lock:
            for handle in self._handles.values():
                handle.close()
            self._handles.clear()

    def _handle(self, path: Path) -> FileIO:
        owned = (path, threading.get_ident())
        with self._lock:
            if owned not in self._handles:
                self._handles[owned] = FileIO(path)
            return self._handles[owned]


def _message(piece: ReadPiece, position: int, reason: str) -> str:
    return f"{piece.path}: reading {', '.join(piece.names)} at byte {position} failed: {reason}"
