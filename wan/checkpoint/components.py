"""Config and weight locations of one pipeline component (VAE, text encoder, image encoder).

Reads only headers and, in a diffusers folder, `config.json`. Checks the tensors against the component's module, and
loads no weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...offload import FileHeader, FileTensor, read_scales, read_tensors
from .files import CheckpointError, json_object
from .model_part import WRAPPERS, ModelPart
from .quantised_layers import FILE_MARKER, FP8_DTYPES, resolve_quantisation

CONFIG = "config.json"
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONVERTED_DTYPES = (torch.float64, *FP8_DTYPES)
"""Dtypes accepted, though published files do not have them. They are converted with a warning."""

logger = logging.getLogger("wanstream.checkpoint")

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
    """Refuse a config that differs from `expected` in a key. `model` is the right model, for the message.

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
        CheckpointError: the message has the key and the value.
    """
    for key in keys:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(folder / CONFIG, f"{key} is {value!r}; a whole number above 0 is expected")


def build_on_meta(path: Path, build: Callable[[], ModuleT]) -> ModuleT:
    """Build the module described by the file `path` on the meta device, in eval mode.

    Raises:
        CheckpointError: `build` rejects the values in the file.
    """
    try:
        with torch.device("meta"):
            module = build()
    except (TypeError, ValueError, LookupError) as err:
        raise CheckpointError(path, f"describes no model that can be built: {err}") from err
    return module.eval().requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class ComponentFile:
    """Component tensors by file name, without a prefix and without tensors for other uses."""

    path: Path
    """File, or diffusers pipeline folder."""
    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor]
    """Scale of each scaled weight, under the weight name."""
    notes: tuple[str, ...]
    """Sentences about unused tensors."""


def component_file(
    header: FileHeader,
    *,
    marks: Collection[str],
    roots: Collection[str],
    unused: Container[str] = (),
    shared: Container[str] = (),
) -> ComponentFile:
    """Return the component tensors in a file or a folder with this header.

    Args:
        marks: tensor names, one of which every such component has. The text in front of it is the prefix.
        roots: first name parts in this component. Tensors with other names are left out: other models in a checkpoint,
            and training state.
        unused: names of further tensors to leave out.
        shared: names of tensors that may have only the first parts of the prefix.

    Raises:
        CheckpointError: two prefixes have a component each, two keys have the same name, or a scale does not fit.
    """
    part = component_part(
        header.path, header.tensors, marks=marks, roots={*roots, FILE_MARKER}, unused=unused, shared=shared
    )
    resolved = resolve_quantisation(header.path, part.tensors, header.metadata, read_tensors)
    notes = () if part.note is None else (f"{header.path.name}: {part.note}",)
    for note in notes:
        logger.info("%s", note)
    return ComponentFile(path=header.path, weights=resolved.weights, scales=resolved.scales, notes=notes)


def component_part(
    path: Path,
    tensors: Mapping[str, FileTensor],
    *,
    marks: Collection[str],
    roots: Collection[str],
    unused: Container[str] = (),
    shared: Container[str] = (),
) -> ModelPart:
    """Return a component's part of a checkpoint, as `component_file`. Without a mark it is everything."""
    prefix = _prefix(path, tensors, marks)
    if prefix is None:  # another model, refused by the caller
        return ModelPart(tensors=tensors, ignored=())
    keys: dict[str, str] = {}
    ignored = []
    for key in tensors:
        bare = WRAPPERS.sub("", key)
        parts, dot, last = bare.rpartition(".")
        name = last if last in shared and prefix.startswith(parts + dot) else bare.removeprefix(prefix)
        outside = not bare.startswith(prefix) and name not in shared and name != FILE_MARKER
        if outside or name.split(".")[0] not in roots or name in unused:
            ignored.append(key)
        elif name in keys:
            raise CheckpointError(path, f"holds {name} twice, as {keys[name]} and {key}: use another file")
        else:
            keys[name] = key
    return ModelPart(tensors={name: tensors[key] for name, key in keys.items()}, ignored=tuple(ignored))


def _prefix(path: Path, keys: Iterable[str], marks: Collection[str]) -> str | None:
    bare = (WRAPPERS.sub("", key) for key in keys)
    found = dict.fromkeys(
        key.removesuffix(mark) for key in bare for mark in marks if key == mark or key.endswith(f".{mark}")
    )
    if len(found) > 1:
        named = " and ".join(map(repr, found))
        raise CheckpointError(
            path,
            f"holds {len(found)} models of one kind, under the prefixes {named}: save the one to use in a file alone",
        )
    return next(iter(found), None)


def precision_warnings(path: Path, weights: Iterable[FileTensor], remedy: str) -> tuple[str, ...]:
    """Return warnings about weights in `CONVERTED_DTYPES`. `remedy` names the usual file."""
    counts = Counter(tensor.dtype for tensor in weights if tensor.dtype in CONVERTED_DTYPES)
    return tuple(
        f"{path.name} holds {count} tensors in {str(dtype).removeprefix('torch.')}, which are converted: "
        + (f"fp8 costs precision, {remedy}" if dtype in FP8_DTYPES else remedy)
        for dtype, count in counts.items()
    )


def read_component(
    weights: Mapping[str, FileTensor], scales: Mapping[str, FileTensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read weights into new CPU memory, multiply them by their scales and convert them to `dtype`."""
    factors = read_scales(scales)
    return {
        name: (stored.float() * factors[name] if name in factors else stored).to(dtype)
        for name, stored in read_tensors(weights).items()
    }


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
    """Return the file tensor of each `module` parameter, in module order.

    Args:
        aliases: map from alternative parameter names, in files or in the module, to the canonical ones.
        dtypes: dtypes allowed in the file.
        described_by: source of the module sizes, for messages.
        key_of: function from a parameter name to the file key, for messages.
        packed: names of parameters that may have a packing.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has the wrong shape, dtype or packing. The message has its
            name.
    """
    aliases = aliases or {}
    stored = {aliases.get(name, name): tensor for name, tensor in tensors.items()}
    # Some library releases tie a parameter and an alias when the module is built, others when it is loaded.
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
