"""Saved states of unfinished runs, so that a run continues after the process was killed.

A state is a safetensors file named by a digest of all inputs to the result. Files that do not match
the run are ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..devices.machine import write_whole
from ..offload.formats import FileVersion
from ..schema import VERSION
from .inputs.request import DenoiseRequest
from .steps.errors import SamplingCancelled
from .steps.parallel import RunState
from .steps.solvers import SOLVERS

SUFFIX = ".safetensors"
OWN_NAME = re.compile(r"(part-.+|[0-9a-f]{64})\.safetensors")
"""Names of states, and of partly written ones from a killed process. Other files in the folder are
not removed."""
LATENTS = "latents"
STATE = "wanstream_state"
TENSOR = "tensor"
"""Key for a tensor name in the JSON of a history."""
WEIGHTS = (".safetensors", ".sft", ".gguf", ".json")
MAX_AGE_S = 14 * 24 * 3600.0
"""Age limit for the state of a run that was never continued."""
MAX_BYTES = 8 << 30
"""Size limit for all states in a folder: a hundred of 1280x720x81, 77 MB each."""
STATE_TENSORS = 4
"""Most tensors with the noise's size in a state: the latents, and three from the UniPC solver."""

logger = logging.getLogger("wanstream.sampling")


def state_bytes(request: DenoiseRequest) -> int:
    """Return an upper bound for the size of a state, in bytes."""
    return STATE_TENSORS * 4 * request.noise.numel()


def run_digest(*inputs: object) -> str:
    """Return a digest of values, tensor contents, and versions.

    The versions are those of this package, torch and diffusers. Raises TypeError for a value
    without a comparable content.
    """
    digest = hashlib.sha256()
    _update(digest, (VERSION, str(torch.__version__), version("diffusers"), inputs))
    return digest.hexdigest()


def file_versions(paths: Iterable[Path]) -> tuple[object, ...]:
    """Return size and modification time for every model file at these paths.

    Missing files are left out.
    """
    found = []
    for path in paths:
        # Not `rglob`, which does not follow links: a component in a pipeline folder may be a link
        # to another folder.
        for file in (path, *sorted(path.glob("*")), *sorted(path.glob("*/*"))):
            # A download's links may be broken, for files that no expert reads.
            if file.suffix in WEIGHTS and file.is_file():
                found.append((str(file), FileVersion.of(file.stat())))
    return tuple(found)


def _update(digest: Any, value: object) -> None:
    """Add a value to a digest. Values with different types or structure differ."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        # As bytes, because numpy has no bf16. Flat, because a 0-d tensor has no view as bytes.
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        named = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, DenoiseRequest):
            # In keyword order, whatever the layout of the request's values.
            named = value.keywords()
        # The count and the names keep values with other fields apart.
        digest.update(f"{type(value).__name__} {len(named)};".encode())
        for name, each in named.items():
            digest.update(f"{name}=".encode())
            _update(digest, each)
    elif isinstance(value, Mapping):
        # Sorted, so that equal mappings in another order have the same digest.
        _update(digest, sorted(value.items()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"sequence {len(value)};".encode())
        for each in value:
            _update(digest, each)
    elif value is None or isinstance(value, bool | int | float | str | Path | Enum):
        plain = str(value) if isinstance(value, Path) else getattr(value, "value", value)
        # With the length, so that no two sequences of values have the same bytes.
        text = repr(plain)
        digest.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")


class SavedRun(AbstractContextManager["SavedRun"]):
    """States of one run in a folder: one per part, where a part is a separate request.

    A context for the run. The states are removed if it ends well or is cancelled, and kept after
    any other error.

    Args:
        folder: created with the first state, and removed when it is empty. None: nothing is saved.
        inputs: everything but the requests that determines the result.
        on_change: called with a message for each part that continues, and for the first state that
            cannot be saved.
        is_cancel: True for an error that counts as a cancel, in addition to SamplingCancelled.
    """

    def __init__(
        self,
        folder: Path | None,
        parts: Sequence[DenoiseRequest],
        inputs: object,
        on_change: Callable[[str], None],
        is_cancel: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._on_change = on_change
        self._is_cancel = is_cancel
        self._has_fault = False
        self._paths: list[Path] = []
        if folder is not None:
            self._paths = [folder / f"{run_digest(part, inputs)}{SUFFIX}" for part in parts]
        self._unfinished = set(range(len(parts)))

    def load(self) -> list[RunState | None]:
        """Return each part's last saved state, or None for a part without one.

        Outdated files are removed first.
        """
        if self._folder is None:
            return [None] * len(self._parts)
        # The folder does not exist before the first state.
        with suppress(OSError):
            _remove_outdated(self._folder, {path.name for path in self._paths})
        found = [
            _read(path, request) for path, request in zip(self._paths, self._parts, strict=True)
        ]
        is_over = [
            state is not None and self._is_over(part, state) for part, state in enumerate(found)
        ]
        # A finished run removes its states, so other runs of these parts saved these.
        if all(is_over):
            return [None] * len(found)
        self._unfinished = {part for part, each in enumerate(is_over) if not each}
        for part, state in enumerate(found, 1):
            if state is not None:
                which = f" in part {part} of {len(found)}" * (len(found) > 1)
                self._on_change(
                    f"continued from step {state.next_step} of an interrupted run{which}"
                )
        return found

    def save(self, part: int, state: RunState) -> None:
        """Save a part's state in place of its last one.

        A fault is reported once, and the last state is kept.
        """
        if self._is_over(part, state):
            self._unfinished.discard(part)
        if self._folder is None or not self._unfinished:
            return  # without unfinished parts, the run is about to end
        try:
            _write(self._paths[part], state)
        except OSError as err:
            if not self._has_fault:
                self._on_change(
                    f"a state of this run cannot be saved in {self._folder} "
                    f"({err.strerror or err}): the run goes on, and starts from an earlier step if "
                    "its process ends"
                )
            self._has_fault = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_over = error is None or isinstance(error, SamplingCancelled) or self._is_cancel(error)
        if self._folder is None or not is_over:
            return
        # Not raised: the run is complete or cancelled, and a later run removes outdated files.
        with suppress(OSError):
            for path in self._paths:
                path.unlink(missing_ok=True)
            # This fails while the folder has states of other runs.
            self._folder.rmdir()

    def _is_over(self, part: int, state: RunState) -> bool:
        return state.next_step >= self._parts[part].step_plan.steps.stop


def _remove_outdated(folder: Path, kept: Container[str]) -> None:
    """Remove too old states, and the oldest beyond `MAX_BYTES`.

    Except `kept`: a batch alone may have more than `MAX_BYTES`.
    """
    found = [
        (path, path.lstat())
        for path in folder.iterdir()
        if OWN_NAME.fullmatch(path.name) and path.name not in kept and path.is_file()
    ]
    oldest_s = time.time() - MAX_AGE_S
    nbytes = 0
    # The newest first, so that the limit removes the oldest.
    for path, status in sorted(found, key=lambda each: each[1].st_mtime, reverse=True):
        nbytes += status.st_size
        if status.st_mtime < oldest_s or nbytes > MAX_BYTES:
            logger.info("removed %s, the state of a run that was not continued", path)
            path.unlink(missing_ok=True)


def _write(path: Path, state: RunState) -> None:
    """Write a state as `write_whole` does."""
    tensors = {LATENTS: state.latents.contiguous()}
    history = {
        name: _stored(f"history.{name}", value, tensors) for name, value in state.history.items()
    }
    metadata = {STATE: json.dumps({"next_step": state.next_step, "history": history})}
    write_whole(path, safetensors.torch.save(tensors, metadata=metadata))


def _stored(name: str, value: object, tensors: dict[str, torch.Tensor]) -> object:
    """Return a history value as JSON, and add its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        # safetensors refuses tensors with gaps.
        tensors[name] = value.contiguous()
        return {TENSOR: name}
    if isinstance(value, list):
        return [_stored(f"{name}.{number}", each, tensors) for number, each in enumerate(value)]
    assert value is None or isinstance(value, bool | int | float), (
        f"{name} is a {type(value).__name__}"
    )
    return value


def _read(path: Path, request: DenoiseRequest) -> RunState | None:
    """Return the state in a file. None without a file, and with a warning for a damaged one."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Copies: tensors mapped from the file would not be aligned, and Windows would not
            # replace the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            # safetensors returns None for a header without metadata.
            return _checked(json.loads((file.metadata() or {})[STATE]), tensors, request)
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as err:
        logger.warning(
            "the state %s is ignored, and the run starts from its first step: %s", path, err
        )
        return None


def _checked(
    stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], request: DenoiseRequest
) -> RunState:
    """Return the stored state.

    Raises ValueError, KeyError or TypeError unless it belongs to the request.
    """
    steps = request.step_plan.steps
    latents = tensors[LATENTS]
    if stored["next_step"] not in range(steps.start + 1, steps.stop + 1):
        raise ValueError(
            f"step {stored['next_step']} of a run of steps {steps.start} to {steps.stop}"
        )
    fits = latents.shape == request.noise.shape and latents.dtype == torch.float32
    if not fits or not latents.isfinite().all():
        raise ValueError(f"latents of {list(latents.shape)}, {latents.dtype}, or not finite")
    history = {name: _restored(value, tensors) for name, value in stored["history"].items()}
    if set(history) != set(SOLVERS[request.step_settings.solver].history):
        raise ValueError(
            f"a history of {', '.join(history)}, and the solver is {request.step_settings.solver}"
        )
    return RunState(next_step=stored["next_step"], latents=latents, history=history)


def _restored(value: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, dict):
        return tensors[value[TENSOR]]
    if isinstance(value, list):
        return [_restored(each, tensors) for each in value]
    return value
