"""Locks on files, which the system lets go of when the process that holds them ends, however it ends."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import TracebackType

if sys.platform != "win32":
    import fcntl


class FileLock:
    """One opened file and its lock. Two of the same path exclude each other also inside one process.

    Args:
        path: the file; made if it is missing, readable by this user only.
        create: False: raise where it is missing.

    Raises:
        OSError: the file cannot be opened, is none of this user's, or the system has no such locks.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if sys.platform == "win32":
            raise OSError("this system has no file locks of the kind that is needed")
        self._path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.descriptor = os.open(path, flags, 0o600)
        status = os.fstat(self.descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            self.close()
            raise PermissionError(1, "it belongs to another user", str(path))

    def share(self) -> None:
        """Wait until nobody excludes others, and be one of those who share; an exclusive lock is turned into this."""
        self._lock(shared=True, wait=True)

    def exclude(self) -> None:
        """Wait until nobody else holds the lock, and exclude others."""
        self._lock(shared=False, wait=True)

    def try_exclude(self) -> bool:
        """Exclude others, unless somebody else holds the lock; then this one holds nothing any more."""
        try:
            self._lock(shared=False, wait=False)
        except BlockingIOError:
            return False
        return True

    def is_at_its_path(self) -> bool:
        """Whether the file is still there under its name."""
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))

    def close(self) -> None:
        """Let go of the lock and the file."""
        os.close(self.descriptor)

    def _lock(self, *, shared: bool, wait: bool) -> None:
        if sys.platform != "win32":
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self.descriptor, kind if wait else kind | fcntl.LOCK_NB)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
