"""Native ComfyUI models whose blocks stay in the file.

Opening reads headers, and everything outside the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import comfy.model_base
import comfy.model_management
import torch
from torch import nn

from .....offload.formats import CheckpointFileError, FileTensor, decode_tensor, piece_name
from .....offload.sources import FileSource, StoredFile, read_tensors
from .....plan.programs import BlockKey
from .....schema import SMALLEST_BLOCK
from ... import versions
from ...patcher_memory import PolicyMemory
from ..network.block_lists import NotStreamedError, blocks_to_stream, listed
from ..network.build import build_model
from ..network.entries import Dtypes, Entry, dtype_of, entries, parameters
from ..network.layers import inner_tensors, is_in_file, is_in_memory, is_joined, joined
from .weights import DIFFUSION_MODEL, STACK, NativeWeights

MODEL_LOADER = "Load Diffusion Model"
"""ComfyUI's node for a file with only a diffusion model."""
CHECKPOINT_LOADER = "Load Checkpoint"
"""ComfyUI's node for a file with a whole model."""

LARGE_PARAMETER = 1_000_000
"""Smallest block parameter, in bytes, that streams without being a Linear matrix: stacked MoE
experts."""

Places: TypeAlias = Mapping[str, FileTensor]
"""A parameter's places in the file by piece. A single piece has no name."""


class _Streamed(NamedTuple):
    """One streamed block parameter."""

    key: BlockKey
    name: str
    """Name within the block."""
    path: str
    """Key in the model's state dict."""
    entry: Entry
    dtype: torch.dtype
    """Dtype to compute with."""
    places: Places


def open_native(
    path: Path,
    weight_dtype: str = "default",
    *,
    large_parameter: int = LARGE_PARAMETER,
    loader: str,
    **limits: int,
) -> comfy.model_base.BaseModel:
    """Return ComfyUI's model for a file, with a `NativeWeights` and a `PolicyMemory`.

    They are in the attributes `weights` and `memory`.

    `stored` has the streamed tensors by state dict key. They are read when used. Packed GGUF
    tensors have no values.

    Args:
        path: a safetensors or GGUF file.
        weight_dtype: one of `WEIGHT_DTYPES`.
        large_parameter: see `LARGE_PARAMETER`.
        loader: ComfyUI's node for the file, recommended in errors.
        limits: `smallest_block` and `smallest_model`, as for `blocks_to_stream`.

    Raises:
        CheckpointFileError: the file cannot be read, holds no model that ComfyUI detects, or has no
            blocks to stream.
    """
    file = StoredFile(path)
    model, dtypes = build_model(path, file, weight_dtype)
    try:
        stream_from_files(
            model,
            [file],
            network=DIFFUSION_MODEL,
            dtypes=dtypes,
            linear=versions.linear_layers(model),
            device=comfy.model_management.get_torch_device(),
            large_parameter=large_parameter,
            loader=loader,
            limits=limits,
        )
    except NotStreamedError as err:
        raise CheckpointFileError(path, str(err)) from err
    return model


def stream_from_files(  # noqa: PLR0913 (of a model, its files and the kinds of its tensors)
    model: Any,
    files: Sequence[StoredFile],
    *,
    network: str,
    dtypes: Dtypes,
    linear: tuple[type, ...],
    device: torch.device,
    loader: str,
    large_parameter: int = LARGE_PARAMETER,
    kept: tuple[type, ...] = (),
    limits: Mapping[str, int],
) -> None:
    """Make the blocks stream in a model with file tensors, and load all other tensors.

    Args:
        model: a ComfyUI model.
        files: the model files.
        network: see `NativeWeights`.
        dtypes: dtypes in which ComfyUI keeps the tensors.
        linear: linear layer classes.
        device: compute device.
        loader: ComfyUI's node for the files, recommended in errors.
        large_parameter: see `LARGE_PARAMETER`.
        kept: layer classes that read a large weight on use, outside the block lists. If no
            file has such a weight, it stays on `meta`.
        limits: see `blocks_to_stream`.

    Raises:
        NotStreamedError: as `blocks_to_stream`.
    """
    root = model.get_submodule(network)
    located = _located(root, files, linear, large_parameter)

    def matrix_bytes(module: nn.Module) -> int:
        # Other large parameters stream within a block, but convolutions alone are not blocks.
        matrices = (
            located.get(entry.place, {})
            for entry in parameters(module)
            if _is_matrix(entry, linear)
        )
        return sum(place.nbytes for places in matrices for place in places.values())

    kind = type(model).__name__
    # A layer that is read without a call cannot be a block.
    layers = tuple(each for each in linear if each not in kept)
    remedy = f"load it with {loader}"
    blocks = blocks_to_stream(root, matrix_bytes, kind=kind, layers=layers, remedy=remedy, **limits)
    streamed = list(_streamed(network, blocks, located, dtypes))
    smallest = limits.get("smallest_block", SMALLEST_BLOCK)
    model.in_file = _kept(root, kept, smallest, dtypes)
    model.plain_loader = loader
    _load_others(model, root, files, streamed, dtypes)
    weights = _weights(network, blocks, streamed, model, device)
    stream_weights(model, weights, " and ".join(file.path.name for file in files))


def _located(
    root: nn.Module, files: Sequence[StoredFile], linear: tuple[type, ...], large_parameter: int
) -> dict[tuple[int, str], Places]:
    """Return the places of all parameters that stream when inside a block."""
    return {
        entry.place: places
        for entry in parameters(root)
        if (
            _is_matrix(entry, linear)
            or (entry.tensor.dim() > 2 and entry.tensor.nbytes >= large_parameter)
        )
        and (places := _locate(entry.tensor, files))
    }


def _kept(
    root: nn.Module, kinds: tuple[type, ...], smallest: int, dtypes: Dtypes
) -> dict[str, torch.Tensor]:
    """Return the weights that stay in the file, in layers of these kinds, by key.

    A weight that ComfyUI would keep in another dtype is loaded.
    """
    in_lists = {id(module) for block in listed(root) for module in block.modules()}
    found: dict[str, torch.Tensor] = {}
    modules: Iterable[tuple[str, nn.Module]] = root.named_modules()
    for path, module in modules:
        if not isinstance(module, kinds):
            continue
        for name, tensor in module.named_parameters(recurse=False):
            is_stored = is_in_file(tensor) and id(module) not in in_lists
            is_large = tensor.nbytes >= smallest
            is_same = dtype_of(Entry(module, name, tensor), dtypes) == tensor.dtype
            if tensor.is_meta or (is_stored and is_large and is_same):
                found[f"{path}.{name}"] = tensor
    return found


def stream_weights(model: Any, weights: NativeWeights, name: str) -> None:
    """Give a model the streamed weights and a policy memory."""
    model.weights = weights
    model.memory = PolicyMemory(f"blocks of {name}")
    # ComfyUI drops models from the cache without unloading them first.
    weakref.finalize(model, weights.close).atexit = False


def outside_bytes(model: nn.Module) -> int:
    """Return the bytes outside the streamed tensors."""
    return sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if is_in_memory(tensor)
    )


def _load_others(
    model: Any,
    root: nn.Module,
    files: Sequence[StoredFile],
    streamed: Sequence[_Streamed],
    dtypes: Dtypes,
) -> None:
    """Take streamed tensors out of the model, and load all that do not stay in the file."""
    model.stored = {each.path: each.entry.tensor for each in streamed}
    for each in streamed:
        if is_joined(each.entry.tensor):
            vars(each.entry.module)["streamed"] = (each.entry.tensor,)
        each.entry.replace(torch.empty(each.entry.tensor.shape, dtype=each.dtype, device="meta"))
    absent = {each.entry.place for each in streamed}
    kept = set(map(id, model.in_file.values()))
    others = [
        entry
        for entry in entries(root)
        if entry.place not in absent and id(entry.tensor) not in kept
    ]
    # All at once: a model has about a thousand, and most are read faster than a file opens.
    places = [_places(entry.tensor, files) for entry in others]
    labelled: dict[str, FileTensor] = {}
    for number, of_entry in enumerate(places):
        labelled |= {_label(number, name): place for name, place in of_entry.items()}
    read = read_tensors(labelled)
    for number, (entry, of_entry) in enumerate(zip(others, places, strict=True)):
        # `pop`, so that the stored value is freed as soon as it is converted.
        values = {name: read.pop(_label(number, name)) for name in of_entry}
        _load(entry, files, dtype_of(entry, dtypes), values)


def _label(number: int, name: str) -> str:
    return f"tensor {number} {name}".strip()


def _place(tensor: torch.Tensor, files: Iterable[StoredFile]) -> FileTensor | None:
    return next((place for file in files if (place := file.locate(tensor)) is not None), None)


def _places(tensor: torch.Tensor, files: Sequence[StoredFile]) -> Places:
    """Return contiguous tensor places, by name for the inner tensors in a quantised weight."""
    inner = {"": tensor}
    if is_joined(tensor):
        inner = inner_tensors(tensor)
    places = {name: _place(each, files) for name, each in inner.items()}
    return {name: place for name, place in places.items() if place is not None}


def _weights(
    network: str,
    blocks: Mapping[str, nn.Module],
    streamed: Iterable[_Streamed],
    model: nn.Module,
    device: torch.device,
) -> NativeWeights:
    matrices: dict[BlockKey, dict[str, FileTensor]] = {}
    quantised: dict[BlockKey, dict[str, torch.Tensor]] = {}
    # Several encoders may have the same names, but each has the dtype of its own file.
    dtypes: dict[BlockKey, dict[str, torch.dtype]] = {}
    for each in streamed:
        for piece, place in each.places.items():
            name = each.name
            dtype = each.dtype
            if piece:
                name = piece_name(each.name, piece)
                dtype = place.dtype  # of bytes, which are joined into a weight unchanged
            matrices.setdefault(each.key, {})[name] = place
            dtypes.setdefault(each.key, {})[name] = dtype
        if is_joined(each.entry.tensor):
            quantised.setdefault(each.key, {})[each.name] = each.entry.tensor
    return NativeWeights(
        {STACK: blocks},
        partial(FileSource, matrices, computed_dtypes=dtypes),
        quantised=quantised,
        outside_bytes=outside_bytes(model),
        device=device,
        network=network,
    )


def _streamed(
    network: str,
    blocks: Mapping[str, nn.Module],
    located: Mapping[tuple[int, str], Places],
    dtypes: Dtypes,
) -> Iterator[_Streamed]:
    prefix = f"{network}." if network else ""
    for index, (block_path, block) in enumerate(blocks.items()):
        paths = {id(module): path for path, module in block.named_modules()}
        for entry in parameters(block):
            if entry.place in located:
                within = f"{paths[id(entry.module)]}.{entry.name}".lstrip(".")
                yield _Streamed(
                    key=BlockKey(STACK, index),
                    name=within,
                    path=f"{prefix}{block_path}.{within}",
                    entry=entry,
                    dtype=dtype_of(entry, dtypes),
                    places=located[entry.place],
                )


def _is_matrix(entry: Entry, linear: tuple[type, ...]) -> bool:
    # A bank of experts has one more dimension.
    return entry.tensor.dim() >= 2 and isinstance(entry.module, linear)


def _locate(tensor: torch.Tensor, files: Sequence[StoredFile]) -> Places:
    """Return a tensor's places in the files.

    A plain tensor has one. A quantised weight has one for each large inner tensor, as bytes.
    """
    if not is_joined(tensor):
        return _places(tensor, files)
    # A single number, such as the scale for a whole matrix, stays on the device.
    large = {name: inner for name, inner in inner_tensors(tensor).items() if inner.numel() > 1}
    places = {name: place for name, place in _places(tensor, files).items() if name in large}
    return {
        name: replace(place, dtype=torch.uint8, shape=(place.nbytes,))
        for name, place in places.items()
    }


def _load(
    entry: Entry,
    files: Sequence[StoredFile],
    dtype: torch.dtype,
    values: Mapping[str, torch.Tensor],
) -> None:
    """Load a tensor that does not stream into memory, in ComfyUI's dtype for it.

    Args:
        entry: the tensor.
        files: the model files.
        dtype: ComfyUI's dtype.
        values: file values for the tensor, or for inner tensors by name, where they are
            contiguous in the file.
    """
    tensor = entry.tensor
    if is_joined(tensor):
        cloned = {
            # In memory, or not contiguous in the file: then `clone` reads the values.
            name: inner.clone()
            for name, inner in inner_tensors(tensor).items()
            if name not in values
        }
        entry.replace(joined(tensor, {**cloned, **values}))
    elif not any(file.has(tensor) for file in files):
        if tensor.is_meta:  # missing in the file, as logged by ComfyUI
            entry.replace(torch.zeros(tensor.shape, dtype=dtype))
    elif tensor.is_meta:
        place = _place(tensor, files)
        # Other tensors were refused while loading.
        assert place is not None, f"{entry.name} is not a number of whole groups"
        decoded = torch.empty(tensor.shape, dtype=dtype)
        decode_tensor(values[""], decoded, packing=place.packing)
        entry.replace(decoded)
    else:
        if not values:
            values = {"": tensor.detach().clone()}
        entry.replace(values[""].to(dtype))
