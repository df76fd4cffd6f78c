"""JSON files with measurements of devices, in the user's cache folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs


def cache_folder() -> Path:
    """Return the user's cache folder of this package, which may not exist yet."""
    return Path(platformdirs.user_cache_dir("wanstream", appauthor=False))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON atomically: a reader finds the old file or the complete new one.

    Raises:
        OSError: the file cannot be written. Nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            Path(file.name).unlink()
            raise
    os.replace(file.name, path)
