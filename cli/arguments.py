"""Command line parsing, exit codes, Ctrl-C, and arguments for several commands."""

from __future__ import annotations

import argparse
import difflib
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..schema.text import JsonTextError, parse_json
from ..shapes import PIXELS_PER_LATENT, VideoShape

if TYPE_CHECKING:
    import torch

DONE = 0
FAILED = 1
"""A node, a row or a measurement failed."""
INVALID = 2
"""The workflow or the arguments are invalid. Nothing ran."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that suggests the nearest option or command for a mistyped one.

    It does so in subcommands, too.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.color = False  # Python 3.14 colors help by control characters, shown by `plain_output`

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ArgumentParser, but refuse unknown options here.

        Only the parser of a subcommand has its options.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                "unrecognized arguments: "
                f"{' '.join(unknown)}{_nearest(unknown, self._option_string_actions)}"
            )
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit with 2."""
        # argparse passes only the message to this method.
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            # Some versions of Python quote the choices, newer ones do not.
            known = [name.strip("' ") for name in choice[2].split(",")]
            message += _nearest([choice[1]], known)
        super().error(message)


def _nearest(unknown: Sequence[str], known: Any) -> str:
    near: list[str] = []
    for name in unknown:
        # The name alone, without a value.
        near += difflib.get_close_matches(name.split("=")[0], list(known), n=1)
    return f"; did you mean {', '.join(near)}?" * bool(near)


@contextmanager
def handle_sigint(on_request: Callable[[], None], *, requests: int) -> Iterator[None]:
    """Inside the `with`, call `on_request` for the first Ctrl-C `requests`.

    The next one ends the process as usual. `on_request` runs in the signal handler, so it must only
    set flags.
    """
    left = requests

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        # The handler is reset first: if `on_request` hangs, Ctrl-C still ends the process.
        if not left:
            signal.signal(signal.SIGINT, before)
        on_request()

    # `signal.signal` works in the main thread only.
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ArgumentError(ValueError):
    """An invalid command line argument. Nothing was run, and the command ends with `INVALID`."""


def read_json(path: Path) -> object:
    """Return the value in a JSON file. Raises ArgumentError."""
    try:
        return parse_json(path.read_bytes())
    except OSError as err:
        raise ArgumentError(f"{path} cannot be read: {err.strerror}") from err
    except JsonTextError as err:
        raise ArgumentError(f"{path}: {err}") from err


def check_models(models: Path) -> None:
    """Raise ArgumentError if the folder does not exist."""
    if not models.is_dir():
        raise ArgumentError(
            f"no folder {models}: give --models DIR, or make small models with `wanstream "
            "make-test-model DIR`"
        )


def device_of(name: str | None) -> torch.device:
    """Return the device for `--device`; None: a GPU if there is one. Raises ArgumentError."""
    from ..devices import compute_device  # imports torch, which takes seconds

    try:
        return compute_device(name)
    except ValueError as err:
        raise ArgumentError(f"--device {name}: {err}") from err


def measured_device(name: str | None, models: Path | None) -> torch.device:
    """Return the device to measure, by default a GPU if there is one.

    Raises ArgumentError, also if `models` does not exist.
    """
    if models is not None and not models.exists():
        raise ArgumentError(f"--models {models}: no such file or folder")
    return device_of(name)


def create_output_folder(path: Path) -> Path:
    """Create the folder for `--out` if necessary, and return it. Raises ArgumentError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ArgumentError(f"--out {path}: {err.strerror}") from err
    return path


def video_shape(text: str, *, per_latent: int = PIXELS_PER_LATENT) -> VideoShape:
    """Parse `WIDTHxHEIGHTxFRAMES`.

    Raises ArgumentError, also for sizes that the models do not support. `per_latent` is the number
    of pixels per latent pixel along each side.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if found is None:
        raise ArgumentError(f"--size {text}: write WIDTHxHEIGHTxFRAMES, for example 1280x720x81")
    width, height, frames = map(int, found.groups())
    try:
        return VideoShape(width=width, height=height, frames=frames, per_latent=per_latent)
    except ValueError as err:
        raise ArgumentError(f"--size {text}: {err}") from err
