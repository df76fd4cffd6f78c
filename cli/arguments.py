"""Checks of arguments that several commands share: workflow files, folders, video sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..schema import PIXELS_PER_LATENT, VideoShape


class ArgumentError(ValueError):
    """An invalid command line argument; nothing was run."""


def read_json(path: Path) -> object:
    """Return the value in a JSON file. Raises ArgumentError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ArgumentError(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise ArgumentError(f"{path} is not JSON: {err}") from err


def check_models(models: Path) -> None:
    """Raise ArgumentError if the folder does not exist."""
    if not models.is_dir():
        raise ArgumentError(
            f"no folder {models}: give --models DIR, or make small models with `wanstream make-test-model DIR`"
        )


def create_output_folder(path: Path) -> Path:
    """Create the folder of `--out` if necessary, and return it. Raises ArgumentError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ArgumentError(f"--out {path}: {err.strerror}") from err
    return path


def video_shape(text: str, *, per_latent: int = PIXELS_PER_LATENT) -> VideoShape:
    """Parse `WIDTHxHEIGHTxFRAMES`. Raises ArgumentError, also for sizes that the models do not support.

    `per_latent` is the number of pixels per latent pixel along each side.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if found is None:
        raise ArgumentError(f"--size {text}: write WIDTHxHEIGHTxFRAMES, for example 1280x720x81")
    width, height, frames = map(int, found.groups())
    try:
        return VideoShape(width=width, height=height, frames=frames, per_latent=per_latent)
    except ValueError as err:
        raise ArgumentError(f"--size {text}: {err}") from err
