"""Errors from a full disk, and system errors that SQLite hides."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

_PAGES = bytes(16 * 4096)
"""Some SQLite pages. A transaction needs several, and releases them when it fails."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if `error` or one of the causes is a used-up disk, quota or file size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return True
        error = error.__cause__
    return False


def system_error(err: sqlite3.Error, path: Path) -> OSError:
    """Return the system error behind an SQLite error for `path`, without an errno if there is none.

    SQLite reports an exceeded quota and a file size limit as "disk I/O error", and a missing folder
    as "unable to open database file". Writing a longer temporary file next to `path` fails with the
    system's own error.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            # The probe grows beyond the present size, because a file size limit counts the offset.
            # Python ignores SIGXFSZ, so the write raises EFBIG.
            probe.seek(path.stat().st_size if path.is_file() else 0)
            probe.write(_PAGES)
            probe.flush()
            # Network file systems may report a used-up quota only at this point.
            os.fsync(probe.fileno())
    except OSError as cause:
        return cause
    # SQLite has freed the failed transaction's space, so the probe may have fitted.
    if "disk is full" in str(err):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(None, str(err))
