"""One component of a pipeline (the VAE, the text encoder): its config, and where its weights lie.

Reads headers, and in a diffusers folder a small JSON file; checks them against the module that they have to fill, and
loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...offload import FileTensor
from .files import WEIGHTS, CheckpointError, read_stored

CONFIG = "config.json"
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def component_folder(folder: Path, name: str) -> Path:
    """Return the folder of component `name`, which `folder` either is or, as a pipeline folder, holds.

    Raises:
        CheckpointError: it is neither.
    """
    for candidate in (folder / name, folder):
        if (candidate / CONFIG).is_file():
            return candidate
    raise CheckpointError(
        folder, f"is neither a diffusers pipeline folder with {name}/{CONFIG} nor such a {name} folder"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the JSON object in the folder's `config.json`.

    Raises:
        CheckpointError: it is missing or is not a JSON object.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise CheckpointError(path, f"cannot be read: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:
        raise CheckpointError(path, f"is not JSON: {err}") from err
    if not isinstance(config, dict):
        raise CheckpointError(path, "is not a JSON object")
    return config


def require_config(folder: Path, config: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Refuse a config that has another value for one of the `wanted` keys; `what` is the model that has those."""
    for key, value in wanted.items():
        if config.get(key) != value:
            found = repr(config[key]) if key in config else "missing"
            raise CheckpointError(folder / CONFIG, f"{key} is {found}, {value!r} is expected: give {what}")


def require_sizes(folder: Path, config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a config in which one of `keys` is not a whole number above 0."""
    for key in keys:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(folder / CONFIG, f"{key} is {value!r}; a whole number above 0 is expected")


def build_on_meta(path: Path, build: Callable[[], ModuleT]) -> ModuleT:
    """Build the module that the file `path` describes, without weights, in eval mode.

    Raises:
        CheckpointError: it has values that no such module can be built from.
    """
    try:
        with torch.device("meta"):
            module = build()
    except (TypeError, ValueError, LookupError) as err:
        raise CheckpointError(path, f"describes no model that can be built: {err}") from err
    return module.eval().requires_grad_(False)


def component_weights(
    folder: Path, module: nn.Module, *, weights: str = WEIGHTS, aliases: Mapping[str, str] | None = None
) -> dict[str, FileTensor]:
    """Return where each parameter of `module` lies in a folder of diffusers, in the order of the module.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or no safetensors file.
        CheckpointError: as `match_weights`.
    """
    return match_weights(folder, read_stored(folder, weights=weights).tensors, module, aliases=aliases)


def match_weights(
    path: Path,
    tensors: Mapping[str, FileTensor],
    module: nn.Module,
    *,
    aliases: Mapping[str, str] | None = None,
    dtypes: Iterable[torch.dtype] = STORED_DTYPES,
    described_by: str = CONFIG,
    key_of: Callable[[str], str] = str,
) -> dict[str, FileTensor]:
    """Return which of the `tensors` each parameter of `module` is, in the order of the module.

    `aliases` maps other names of a parameter, in files or in the module, to the one it goes by. `described_by` and
    `key_of` word the errors: what the module was built from, and what its files call a parameter.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape or dtype; names it.
    """
    aliases = aliases or {}
    stored = {aliases.get(name, name): tensor for name, tensor in tensors.items()}
    # Some releases of a library tie a parameter and its alias when the module is built, others when it is loaded.
    shapes = ((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    expected = {aliases.get(name, name): shape for name, shape in shapes}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(path, f"{key_of(name)} {list(shape)} is missing")
        tensor = stored[name]
        if tensor.shape != shape:
            found = f"{key_of(name)} is {list(tensor.shape)}"
            raise CheckpointError(tensor.path, f"{found}; {described_by} asks for {list(shape)}")
        if tensor.dtype not in dtypes:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(tensor.path, f"{key_of(name)} is {tensor.dtype}; one of {wanted} is expected")
    for name in stored.keys() - expected.keys():
        raise CheckpointError(stored[name].path, f"{name} does not belong to the model that {described_by} describes")
    return {name: stored[name] for name in expected}
