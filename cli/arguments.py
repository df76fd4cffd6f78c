"""Arguments that several commands share: workflow files, model folders, video sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..schema import PIXELS_PER_LATENT, VideoShape


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


class SizeError(ValueError):
    """An argument that cannot be understood; nothing was done."""


def video_shape(text: str, *, per_latent: int = PIXELS_PER_LATENT) -> VideoShape:
    """`WIDTHxHEIGHTxFRAMES`. Raises SizeError for anything else, and for sizes that the models cannot make.

    `per_latent` are the pixels for each latent pixel of these models, along either side.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if found is None:
        raise SizeError(f"--size {text}: write WIDTHxHEIGHTxFRAMES, for example 1280x720x81")
    width, height, frames = map(int, found.groups())
    try:
        return VideoShape(width=width, height=height, frames=frames, per_latent=per_latent)
    except ValueError as err:
        raise SizeError(f"--size {text}: {err}") from err
