"""Files that are opened when they are first read, and read at any position from any thread."""

from __future__ import annotations

import os
import threading
from io import FileIO
from pathlib import Path
from typing import Protocol

from .safetensors_header import FileVersion, file_version

HAS_PREADV = hasattr(os, "preadv")


class Files(Protocol):
    """Files by path; the methods may be called from any thread."""

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        """Read up to `len(into)` bytes and return how many; 0 at the end of the file."""
        ...

    def version(self, path: Path) -> FileVersion:
        """Return the present version of a file that this thread has read."""
        ...

    def close(self) -> None:
        """Close what was opened. No read may be under way."""
        ...


class PositionalFiles:
    """One descriptor per file, shared by all threads: `preadv` takes the position with the call.

    Args:
        flags: for `os.open`, beside those for reading.
    """

    def __init__(self, flags: int = 0) -> None:
        self._flags = os.O_RDONLY | flags
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
                self._descriptors[path] = os.open(path, self._flags)
            return self._descriptors[path]


class SeekingFiles:
    """One handle per file and thread, because a handle has one position: for systems without `preadv`."""

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
