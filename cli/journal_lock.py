"""A lock between processes that dies with its holder, on every system that Python runs on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType

from .full_disk import write_failure


class LockedError(OSError):
    """Another process holds the lock, or its file cannot be made; `errno` is set where the system has one."""

    def __str__(self) -> str:
        return str(self.args[-1])


class Lock:
    """Held inside its `with`; the file stays.

    SQLite's exclusive transactions are the locks of files that the standard library has for all systems: the kernel
    gives them back however the process ends. The file holds nothing else, so that the journal can be read meanwhile.
    """

    def __init__(self, path: Path, *, of: str) -> None:
        self._path, self._of = path, of
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Lock:
        """Raises LockedError at once if another process is inside, or if the file cannot be made."""
        assert self._connection is None, "the lock is held already"
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=0)
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as err:
            if connection is not None:
                connection.close()
            if "locked" in str(err):
                raise LockedError(
                    f"another `wanstream batch` is at work on {self._of}: wait for it, or stop it"
                ) from err
            cause = write_failure(self._path)
            if cause is not None:
                raise LockedError(cause.errno, f"{self._path} cannot be locked: {cause.strerror}") from err
            raise LockedError(f"{self._path} cannot be locked: {err}") from err
        self._connection = connection
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None, "the lock is not held"
        self._connection.close()
        self._connection = None
