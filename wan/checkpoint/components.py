"""Config and weight locations for one pipeline component (VAE, text encoder, image encoder).

Reads only headers and, in a diffusers folder, `config.json`. Checks the tensors against the
component's module, and loads no weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from ...devices import dtype_name
from ...offload.formats import FP8_DTYPES, FileHeader, FileTensor
from ...offload.sources import read_scales, read_tensors
from .files import CheckpointError, json_object
from .meta_model import decoded
from .model_part import WRAPPERS, ModelPart, keys_by_name, refuse_several
from .quantised_layers import FILE_MARKER, resolve_quantisation

CONFIG = "config.json"
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONVERTED_DTYPES = (torch.float64, *FP8_DTYPES)
"""Dtypes accepted, though published files do not have them. They are converted with a warning."""
DTYPES = (*STORED_DTYPES, *CONVERTED_DTYPES)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def component_folder(folder: Path, name: str) -> Path:
    """Return component `name`'s folder: a subfolder of the pipeline `folder`, or `folder` itself.

    Raises:
        CheckpointError: `folder` is neither.
    """
    for candidate in (folder / name, folder):
        if (candidate / CONFIG).is_file():
            return candidate
    raise CheckpointError(
        folder,
        f"is neither a diffusers pipeline folder with {name}/{CONFIG} nor such a {name} folder",
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


def require_config(
    folder: Path,
    config: Mapping[str, Any],
    expected: Mapping[str, Any],
    sizes: Iterable[str],
    model: str,
) -> None:
    """Refuse a config that differs from `expected` or has a size other than a whole number > 0.

    `model` is the right model, for the message.

    Raises:
        CheckpointError: the message has the key and the value.
    """
    for key, value in expected.items():
        if config.get(key) != value:
            found = repr(config[key]) if key in config else "missing"
            raise CheckpointError(
                folder / CONFIG, f"{key} is {found}, {value!r} is expected: give {model}"
            )
    for key in sizes:
        value = config.get(key)
        # Not `isinstance`, because True is an int too.
        if type(value) is not int or value < 1:
            raise CheckpointError(
                folder / CONFIG, f"{key} is {value!r}; a whole number above 0 is expected"
            )


def convolution_width(
    path: Path, tensors: Mapping[str, FileTensor], key: str, dimension: int, *, kernel: int
) -> int:
    """Return a channel count of a convolution with `kernel` kernel dimensions of size 3.

    Raises:
        CheckpointError: it is missing, or has another shape.
    """
    if key not in tensors:
        raise CheckpointError(path, f"{key} is missing")
    shape = tensors[key].shape
    if len(shape) != kernel + 2 or 0 in shape:
        sizes = ", 3" * kernel
        raise CheckpointError(path, f"{key} is {list(shape)}; [out, in{sizes}] is expected")
    return shape[dimension]


def build_on_meta(path: Path, build: Callable[[], ModuleT]) -> ModuleT:
    """Build the module for the file `path` on the meta device, in eval mode.

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
    """Component tensors by file name, with neither a prefix nor tensors for other uses."""

    path: Path
    """File, or diffusers pipeline folder."""
    weights: Mapping[str, FileTensor]
    scales: Mapping[str, FileTensor] = field(default_factory=dict)
    """Scales by weight name."""
    notes: tuple[str, ...] = ()
    """Sentences about unused tensors."""
    warnings: tuple[str, ...] = ()
    """Sentences about a loss of precision."""

    def read(
        self, names: Iterable[str], dtype_of: Callable[[str], torch.dtype]
    ) -> dict[str, torch.Tensor]:
        """Read weights into new CPU memory, decoded to the dtype of each name."""
        weights = {name: self.weights[name] for name in names}
        factors = self.read_factors(weights)
        return {
            name: decoded(weights[name], stored, factors.get(name), dtype_of(name))
            for name, stored in read_tensors(weights).items()
        }

    def read_factors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the scales of scaled names: fp32, 0-d or [rows, 1]."""
        return read_scales({name: self.scales[name] for name in names if name in self.scales})


def component_file(
    header: FileHeader,
    *,
    marks: Collection[str],
    roots: Collection[str],
    unused: Container[str] = (),
    shared: Container[str] = (),
) -> ComponentFile:
    """Return the component tensors from a file or folder header.

    Args:
        marks: tensor names, at least one in every such component. The text before it is the
            prefix.
        roots: first name parts in this component. Other names are left out: other models in a
            checkpoint, and training state.
        unused: further tensor names to leave out.
        shared: tensor names that may have only the first parts of the prefix.

    Raises:
        CheckpointError: two prefixes have a component each, two keys have the same name, or a scale
            does not fit.
    """
    prefix = _prefix(header.path, header.tensors, marks)
    part = ModelPart(tensors=header.tensors, ignored=())
    if prefix is not None:  # otherwise another model, refused by the caller
        names = {}
        for key in header.tensors:
            bare = WRAPPERS.sub("", key)
            name = bare.removeprefix(prefix)
            parts, dot, last = bare.rpartition(".")
            if last in shared and prefix.startswith(parts + dot):
                name = last
            is_inside = bare.startswith(prefix) or name in shared or name == FILE_MARKER
            if is_inside and name.split(".")[0] in {*roots, FILE_MARKER} and name not in unused:
                names[key] = name
        keys = keys_by_name(header.path, names)
        part = ModelPart(
            tensors={name: header.tensors[key] for name, key in keys.items()},
            ignored=tuple(key for key in header.tensors if key not in names),
        )
    resolved = resolve_quantisation(header.path, part.tensors, header.metadata, read_tensors)
    return ComponentFile(
        path=header.path,
        weights=resolved.weights,
        scales=resolved.scales,
        notes=part.notes(header.path),
    )


def _prefix(path: Path, keys: Iterable[str], marks: Collection[str]) -> str | None:
    mark = re.compile(rf"(.*\.|)(?:{'|'.join(map(re.escape, marks))})")
    found = dict.fromkeys(
        match[1] for key in keys if (match := mark.fullmatch(WRAPPERS.sub("", key)))
    )
    refuse_several(path, found, "models of one kind")
    return next(iter(found), None)


def match_weights(
    path: Path,
    file: ComponentFile,
    module: nn.Module,
    *,
    remedy: str = "",
    aliases: Mapping[str, str] = MappingProxyType({}),
    described_by: str = CONFIG,
    key_of: Callable[[str], str] = str,
    packed: Container[str] = (),
) -> ComponentFile:
    """Return `file` with a tensor for each `module` parameter, in module order.

    Args:
        path: for messages.
        file: tensors by parameter name.
        remedy: the usual file, for warnings about dtypes in `CONVERTED_DTYPES`.
        aliases: canonical names by alternative parameter name, in files or in the module.
        described_by: source of the module sizes, for messages.
        key_of: function from a parameter name to the file key, for messages.
        packed: parameter names that may have a packing.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has the wrong shape, dtype or packing.
            The message has its name.
    """
    stored = {aliases.get(name, name): tensor for name, tensor in file.weights.items()}
    scales = {aliases.get(name, name): scale for name, scale in file.scales.items()}
    # Some library releases tie a parameter and an alias when the module is built, others when it is
    # loaded.
    shapes = ((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    expected = {aliases.get(name, name): shape for name, shape in shapes}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(path, f"{key_of(name)} {list(shape)} is missing")
        tensor = stored[name]
        if tensor.shape != shape:
            found = f"{key_of(name)} is {list(tensor.shape)}"
            raise CheckpointError(tensor.path, f"{found}; {described_by} requires {list(shape)}")
        found = str(tensor.dtype)
        fits = tensor.dtype in DTYPES
        # A packed tensor's dtype describes the bytes only, so the packing decides.
        if tensor.packing is not None:
            found = tensor.packing.name
            fits = name in packed
        if not fits:
            wanted = ", ".join(map(dtype_name, DTYPES))
            raise CheckpointError(
                tensor.path, f"{key_of(name)} is {found}; one of {wanted} is expected"
            )
    for name in stored.keys() - expected.keys():
        raise CheckpointError(
            stored[name].path, f"{name} does not belong to the model that {described_by} describes"
        )
    weights = {name: stored[name] for name in expected}
    dtypes = Counter(each.dtype for each in weights.values() if each.dtype in CONVERTED_DTYPES)
    loss = dict.fromkeys(FP8_DTYPES, "fp8 costs precision, ")
    return replace(
        file,
        weights=weights,
        scales={name: scale for name, scale in scales.items() if name in expected},
        warnings=tuple(
            f"{file.path.name} holds {count} tensors in {dtype_name(dtype)}, which are converted: "
            f"{loss.get(dtype, '')}{remedy}"
            for dtype, count in dtypes.items()
        ),
    )
