"""Parsing of command lines and of `--set node.input=value`, exit codes, Ctrl-C, and arguments of several commands."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..host.embedded import MOST_NESTED, ComfyNode, Prompt, names_listed, nested_deeper, sockets_of
from ..schema import PIXELS_PER_LATENT, VideoShape

if TYPE_CHECKING:
    import torch

DONE = 0
FAILED = 1
"""A node, a row or a measurement failed."""
INVALID = 2
"""The workflow or the arguments are invalid; nothing ran."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest option or command for a mistyped one, also in subcommands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ArgumentParser, but refuse unknown options here: only the subcommand's parser has its options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown, self._option_string_actions)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit with 2."""
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = [name.strip("' ") for name in choice[2].split(",")]
            message += _nearest([choice[1]], known)
        super().error(message)


def _nearest(unknown: Sequence[str], known: Any) -> str:
    near = [found for name in unknown for found in difflib.get_close_matches(name.split("=")[0], list(known), n=1)]
    return f"; did you mean {', '.join(near)}?" if near else ""


class StopRequest:
    """Number of stop requests of the user so far."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def requested(self) -> bool:
        """True after the first request: start nothing more."""
        return self._count > 0

    @property
    def immediate(self) -> bool:
        """True after the second request: end the running work, too."""
        return self._count > 1

    def request(self) -> None:
        """Add a request."""
        self._count += 1


@contextmanager
def handle_sigint(on_request: Callable[[], None], *, requests: int) -> Iterator[None]:
    """Inside the `with`, call `on_request` for the first Ctrl-C `requests`; the next one ends the process as usual.

    It is called in the signal handler, so it must only set flags.
    """
    left = requests

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        if not left:
            signal.signal(signal.SIGINT, before)
        on_request()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def device_of(name: str | None) -> torch.device:
    """Return the device of `--device`; None: a GPU if there is one. Raises ArgumentError."""
    from ..devices import DeviceError, compute_device  # imports torch, which takes seconds

    try:
        return compute_device(name)
    except DeviceError as err:
        raise ArgumentError(f"--device {name}: {err}") from err


def measured_device(name: str | None, models: Path | None) -> torch.device:
    """Return the device to measure, by default a GPU if there is one. Raises ArgumentError, also without `models`."""
    if models is not None and not models.exists():
        raise ArgumentError(f"--models {models}: no such file or folder")
    return device_of(name)


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


# Values of these types are used as typed; all others are JSON.
TYPED_AS_TEXT = ("STRING", "COMBO")


class OverrideError(ValueError):
    """An override of a missing node or input, or with an unreadable value."""


def apply_overrides(prompt: Prompt, changes: Iterable[str], nodes: Mapping[str, type[ComfyNode]]) -> Prompt:
    """Return a copy of `prompt` with every `node.input=value` applied in order; `nodes` are classes by `class_type`.

    Ranges and choices are not checked here but by the validation of the workflow. Raises OverrideError.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(prompt))
    for change in changes:
        target, equals, text = change.partition("=")
        name, dot, socket = target.rpartition(".")
        if not (equals and dot and name and socket):
            raise OverrideError(f"--set {change}: write node.input=value")
        try:
            node_id = find_node(name, changed)
        except OverrideError as err:
            raise OverrideError(f"--set {name}: {err}") from err
        value = _value(change, changed[node_id], socket, text, nodes)
        if nested_deeper(value, MOST_NESTED):
            raise OverrideError(f"--set {name}.{socket}: the value is nested deeper than {MOST_NESTED} levels")
        changed[node_id].setdefault("inputs", {})[socket] = value
    return changed


def find_node(name: str, prompt: Prompt) -> str:
    """Return the id of the node with the id `name`, or of the only node of that class. Raises OverrideError."""
    if name in prompt:
        return name
    of_class = [node_id for node_id, node in prompt.items() if node.get("class_type") == name]
    if len(of_class) == 1:
        return of_class[0]
    if of_class:
        raise OverrideError(f"several nodes are of the class {name}: use an id, {', '.join(of_class)}")
    raise OverrideError(f"no such node; the workflow has {', '.join(prompt)}")


def _value(
    change: str, node: Mapping[str, Any], socket: str, text: str, nodes: Mapping[str, type[ComfyNode]]
) -> object:
    """Convert `text` to the type of the input."""
    class_type = node.get("class_type", "")
    if class_type not in nodes:
        return text  # the validation of the workflow has a better message for an unknown class
    types = {name: known.io_type for name, known in sockets_of(nodes[class_type].INPUT_TYPES()).items()}
    if socket not in types:
        raise OverrideError(f"--set {change}: {class_type} has no input {socket}; {names_listed(socket, types)}")
    if types[socket] in TYPED_AS_TEXT:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise OverrideError(
            f"--set {change}: {socket} is {types[socket]}, but {text!r} is not a JSON value: {err}"
        ) from err
