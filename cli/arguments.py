"""What commands that take a workflow have in common."""

from __future__ import annotations

import json
from pathlib import Path


class ArgumentError(ValueError):
    """What the command line asks for cannot be run."""


def read_json(path: Path) -> object:
    """The value in a JSON file. Raises ArgumentError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ArgumentError(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise ArgumentError(f"{path} is not JSON: {err}") from err


def check_models(models: Path) -> None:
    """Raise ArgumentError if there is no such folder."""
    if not models.is_dir():
        raise ArgumentError(
            f"no folder {models}: give --models DIR, or make small models with `wanstream make-test-model DIR`"
        )


def made_folder(path: Path) -> Path:
    """The folder that `--out` names, made if need be. Raises ArgumentError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ArgumentError(f"--out {path}: {err.strerror}") from err
    return path
