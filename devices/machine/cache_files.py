"""Files that are complete or do not exist, and the user's cache folder for measurements."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs


def cache_folder() -> Path:
    """Return the user's cache folder for this package. It may not exist yet."""
    return Path(platformdirs.user_cache_dir("wanstream", appauthor=False))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON as `write_whole`."""
    write_whole(path, json.dumps(data, indent=2).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file. Readers find the old one or the complete new one, even after a power cut.

    A killed process leaves a file `part-*` with the suffix of `path`.

    Raises:
        OSError: the file cannot be written. Nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder: a rename to another file system is not atomic.
    handle, part = tempfile.mkstemp(dir=path.parent, prefix="part-", suffix=path.suffix)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            # Data before name: without this, a power cut after the rename could leave an empty
            # file.
            os.fsync(handle)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink()  # after it was closed: Windows does not remove open files
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    if sys.platform == "win32":
        return  # folders cannot be opened on Windows, and NTFS journals names
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
