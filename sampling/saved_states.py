"""States of unfinished runs on disk, so that a run continues after its process was killed.

A state is a safetensors file named by a digest of everything that determines the result. Files that do not match the
run are ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..offload import file_version
from ..schema import VERSION
from .errors import SamplingCancelled
from .inputs.request import DenoiseRequest
from .loop.parallel import RunState
from .solvers import SOLVERS

SUFFIX = ".safetensors"
OWN_NAME = re.compile(r"(part-.+|[0-9a-f]{64})\.safetensors")
"""Names of states, and of what a killed process has written of one. Other files in the folder are not removed."""
LATENTS, STATE = "latents", "wanstream_state"
TENSOR = "tensor"
"""Key of a tensor's name in the JSON of a history."""
WEIGHTS = (".safetensors", ".sft", ".gguf", ".json")
MAX_AGE_S = 14 * 24 * 3600.0
"""Age at which the state of a run that was never continued is removed."""
MAX_BYTES = 8 << 30
"""Most bytes of all states in a folder: a hundred of 1280x720x81, 77 MB each."""
STATE_TENSORS = 4
"""Most tensors of the size of the noise in a state: the latents, and three of the solver UniPC."""

logger = logging.getLogger("wanstream.sampling")


def state_bytes(request: DenoiseRequest) -> int:
    """Return an upper bound of the bytes of a state of this request."""
    return STATE_TENSORS * 4 * request.noise.numel()


def run_digest(*inputs: object) -> str:
    """Return a digest of values, of the contents of tensors, and of the versions of this package, torch and diffusers.

    Raises TypeError for a value whose content is not compared.
    """
    digest = hashlib.sha256()
    _update(digest, (VERSION, str(torch.__version__), version("diffusers"), inputs))
    return digest.hexdigest()


def file_versions(paths: Iterable[Path]) -> tuple[object, ...]:
    """Return size and modification time of every file of models at these paths; nothing for missing ones."""
    # Not `rglob`, which does not follow links: a component of a pipeline folder may be a link to another folder.
    files = (file for path in paths for file in (path, *sorted(path.glob("*")), *sorted(path.glob("*/*"))))
    # Links of a download may be broken, for files that no expert reads.
    return tuple((str(file), file_version(file.stat())) for file in files if file.suffix in WEIGHTS and file.is_file())


def _update(digest: Any, value: object) -> None:
    """Add a value to a digest; values of different types or structure differ."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(f"{type(value).__name__} {len(fields(value))};".encode())
        for each in fields(value):
            digest.update(f"{each.name}=".encode())
            _update(digest, getattr(value, each.name))
    elif isinstance(value, Mapping):
        _update(digest, sorted(value.items()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"sequence {len(value)};".encode())
        for each in value:
            _update(digest, each)
    elif value is None or isinstance(value, bool | int | float | str | Path | Enum):
        text = repr(value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value)
        digest.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """A file in a folder of states."""

    name: str
    nbytes: int
    age_s: float


def outdated(files: Sequence[StateFile], *, max_age_s: float = MAX_AGE_S, max_bytes: int = MAX_BYTES) -> list[str]:
    """Return the names of files to remove: those that are too old, then the oldest beyond `max_bytes`."""
    kept_bytes, removed = 0, list[str]()
    for file in sorted(files, key=lambda each: each.age_s):
        kept_bytes += file.nbytes
        if file.age_s > max_age_s or kept_bytes > max_bytes:
            removed.append(file.name)
    return removed


class SavedRun(AbstractContextManager["SavedRun"]):
    """States of one run in a folder: one for each of its parts, which are requests of their own.

    A context for the run: the states are removed if it ends well or is cancelled, and kept after any other error.

    Args:
        folder: made with the first state, and removed when it is empty; None: nothing is saved.
        inputs: everything but the requests that determines the result.
        on_change: called with a message for each part that continues, and for the first state that cannot be saved.
    """

    def __init__(
        self,
        folder: Path | None,
        parts: Sequence[DenoiseRequest],
        inputs: object,
        on_change: Callable[[str], None],
    ) -> None:
        self._folder, self._parts, self._on_change, self._has_fault = folder, parts, on_change, False
        self._paths = [] if folder is None else [folder / f"{run_digest(part, inputs)}{SUFFIX}" for part in parts]
        self._unfinished = set(range(len(parts)))

    def load(self) -> list[RunState | None]:
        """Return the last saved state of each part, None for a part without one. Outdated files are removed first."""
        if self._folder is None:
            return [None] * len(self._parts)
        with suppress(OSError):
            _remove_outdated(self._folder, {path.name for path in self._paths})
        found = [_read(path, request) for path, request in zip(self._paths, self._parts, strict=True)]
        is_over = [state is not None and self._is_over(part, state) for part, state in enumerate(found)]
        if all(is_over):  # a run that is over has removed its states: these were saved by other runs of these parts
            return [None] * len(found)
        self._unfinished = {part for part, each in enumerate(is_over) if not each}
        for part, state in enumerate(found):
            if state is not None:
                which = f" in part {part + 1} of {len(found)}" if len(found) > 1 else ""
                self._on_change(f"continued from step {state.next_step} of an interrupted run{which}")
        return found

    def save(self, part: int, state: RunState) -> None:
        """Save the state of a part in place of its last one. A fault is reported once, and the last one is kept."""
        if self._is_over(part, state):
            self._unfinished.discard(part)
        if self._folder is None or not self._unfinished:
            return  # without unfinished parts, the run is about to end
        try:
            _write(self._paths[part], state)
        except OSError as err:
            if not self._has_fault:
                self._on_change(
                    f"a state of this run cannot be saved in {self._folder} ({err.strerror or err}): the run goes on, "
                    "and starts from an earlier step if its process ends"
                )
            self._has_fault = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._folder is None or not (kind is None or issubclass(kind, SamplingCancelled)):
            return
        # Not raised: the run is complete or cancelled, and outdated files are removed by a later one.
        with suppress(OSError):
            for path in self._paths:
                path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _is_over(self, part: int, state: RunState) -> bool:
        return state.next_step >= self._parts[part].step_plan.steps.stop


def _remove_outdated(folder: Path, kept: Container[str]) -> None:
    """Remove outdated states, but not those named `kept`: a batch may have more than `MAX_BYTES` of its own."""
    now = time.time()
    found = [(path, path.lstat()) for path in folder.iterdir()] if folder.is_dir() else []
    files = [
        StateFile(name=path.name, nbytes=status.st_size, age_s=now - status.st_mtime)
        for path, status in found
        if OWN_NAME.fullmatch(path.name) and path.name not in kept and path.is_file()
    ]
    for name in outdated(files):
        logger.info("removed %s, the state of a run that was not continued", folder / name)
        (folder / name).unlink(missing_ok=True)


def _write(path: Path, state: RunState) -> None:
    """Write a state: a reader finds the former file or the complete new one, also after a power failure."""
    tensors = {LATENTS: state.latents.contiguous()}
    history = {name: _stored(f"history.{name}", value, tensors) for name, value in state.history.items()}
    metadata = {STATE: json.dumps({"next_step": state.next_step, "history": history})}
    data = safetensors.torch.save(tensors, metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix="part-", suffix=SUFFIX)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink()  # after it was closed: Windows does not remove open files
        raise
    if sys.platform != "win32":  # folders cannot be opened there, and NTFS journals names
        opened = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _stored(name: str, value: object, tensors: dict[str, torch.Tensor]) -> object:
    """Return a value of a history as JSON, and add its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return {TENSOR: name}
    if isinstance(value, list):
        return [_stored(f"{name}.{number}", each, tensors) for number, each in enumerate(value)]
    assert value is None or isinstance(value, bool | int | float), f"{name} is a {type(value).__name__}"
    return value


def _read(path: Path, request: DenoiseRequest) -> RunState | None:
    """Return the state in a file; None without one, and with a warning for one that is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Copies: tensors that are mapped from the file would not be aligned, and Windows would not replace it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            return _checked(json.loads((file.metadata() or {})[STATE]), tensors, request)
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as err:
        logger.warning("the state %s is ignored, and the run starts from its first step: %s", path, err)
        return None


def _checked(stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], request: DenoiseRequest) -> RunState:
    """Return the state that was stored. Raises ValueError, KeyError or TypeError unless it is one of the request."""
    steps, latents = request.step_plan.steps, tensors[LATENTS]
    if stored["next_step"] not in range(steps.start + 1, steps.stop + 1):
        raise ValueError(f"step {stored['next_step']} of a run of steps {steps.start} to {steps.stop}")
    if latents.shape != request.noise.shape or latents.dtype != torch.float32 or not latents.isfinite().all():
        raise ValueError(f"latents of {list(latents.shape)}, {latents.dtype}, or not finite")
    history = {name: _restored(value, tensors) for name, value in stored["history"].items()}
    if set(history) != set(SOLVERS[request.solver].history):
        raise ValueError(f"a history of {', '.join(history)}, and the solver is {request.solver}")
    return RunState(next_step=stored["next_step"], latents=latents, history=history)


def _restored(value: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, dict):
        return tensors[value[TENSOR]]
    return [_restored(each, tensors) for each in value] if isinstance(value, list) else value
