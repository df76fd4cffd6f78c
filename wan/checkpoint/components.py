"""Config and weight locations of one pipeline component (VAE, text encoder, image encoder).

Only headers and, in a diffusers folder, `config.json` are read. The tensors are checked against the module that they
belong to; no weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...offload import FileTensor
from .files import WEIGHTS, CheckpointError, json_object, read_checkpoint

CONFIG = "config.json"
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def component_folder(folder: Path, name: str) -> Path:
    """Return the folder of component `name`: a subfolder of the pipeline `folder`, or `folder` itself.

    Raises:
        CheckpointError: `folder` is neither.
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
        CheckpointError: the file is missing or is not a JSON object.
    """
    path = folder / CONFIG
    try:
        return json_object(path, path.read_bytes())
    except OSError as err:
        raise CheckpointError(path, f"cannot be read: {err.strerror or err}") from err


def require_config(folder: Path, config: Mapping[str, Any], expected: Mapping[str, Any], model: str) -> None:
    """Refuse a config that differs from `expected` in one of its keys; `model` names the right model in the message.

    Raises:
        CheckpointError: a value is missing or differs.
    """
    for key, value in expected.items():
        if config.get(key) != value:
            found = repr(config[key]) if key in config else "missing"
            raise CheckpointError(folder / CONFIG, f"{key} is {found}, {value!r} is expected: give {model}")


def require_sizes(folder: Path, config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a config in which one of `keys` is not a whole number above 0.

    Raises:
        CheckpointError: names the key and its value.
    """
    for key in keys:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(folder / CONFIG, f"{key} is {value!r}; a whole number above 0 is expected")


def build_on_meta(path: Path, build: Callable[[], ModuleT]) -> ModuleT:
    """Build the module that the file `path` describes on the meta device, in eval mode.

    Raises:
        CheckpointError: `build` rejects the values of the file.
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
    """Return the file tensor of each parameter of `module` in a diffusers folder, in the order of the module.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or not a safetensors file.
        CheckpointError: as `match_weights`.
    """
    return match_weights(folder, read_checkpoint(folder, weights=weights).tensors, module, aliases=aliases)


def match_weights(
    path: Path,
    tensors: Mapping[str, FileTensor],
    module: nn.Module,
    *,
    aliases: Mapping[str, str] | None = None,
    dtypes: Iterable[torch.dtype] = STORED_DTYPES,
    described_by: str = CONFIG,
    key_of: Callable[[str], str] = str,
    packed: Container[str] = (),
) -> dict[str, FileTensor]:
    """Return the file tensor of each parameter of `module`, in the order of the module.

    Args:
        aliases: map from alternative parameter names, in files or in the module, to the canonical ones.
        dtypes: dtypes that the file may use.
        described_by: source of the module's sizes, for messages.
        key_of: function from a parameter name to its key in the files, for messages.
        packed: names of the parameters that may have a packing.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has the wrong shape, dtype or packing; names it.
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
            raise CheckpointError(tensor.path, f"{found}; {described_by} requires {list(shape)}")
        if name not in packed if tensor.packing is not None else tensor.dtype not in dtypes:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(tensor.dtype) if tensor.packing is None else tensor.packing.name
            raise CheckpointError(tensor.path, f"{key_of(name)} is {found}; one of {wanted} is expected")
    for name in stored.keys() - expected.keys():
        raise CheckpointError(stored[name].path, f"{name} does not belong to the model that {described_by} describes")
    return {name: stored[name] for name in expected}
