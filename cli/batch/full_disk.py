"""Detection of a full disk in exceptions, including SQLite's ambiguous ones."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The error numbers of a disk, a quota or a file size limit that is used up."""

_PAGES = bytes(16 * 4096)
"""Some pages of a SQLite file: a transaction needs several, and releases them when it fails."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes means a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return True
        error = error.__cause__
    return False


def write_failure(path: Path) -> OSError | None:
    """Return the system's error for a longer file at `path`, or None if such a file can be written.

    SQLite reports an exceeded quota and a file size limit as "disk I/O error", and a missing folder as "unable to open
    database file". Writing a temporary file next to `path` fails with the system's own error.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.seek(path.stat().st_size if path.is_file() else 0)
            probe.write(_PAGES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as err:
        return err
    return None
