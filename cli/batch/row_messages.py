"""Common names for a batch driver and its Ray actors, and digests of sent files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ...batch import sha256_of

PATH = "cli.batch.row_service:RowService"
FINISHED = ".output"
"""Subfolder of the input folder for files with " [output]" in their names."""
STOP_TIMEOUT_S = 5.0


def digest_of(path: Path) -> str:
    """Return a file's SHA-256, read again only if size or time has changed."""
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    return sha256_of(path)
