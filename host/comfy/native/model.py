"""Native ComfyUI models with blocks that stay in the file. Opening reads headers, and everything outside the blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import comfy.model_base
import comfy.model_management
import torch
from torch import nn

from ....offload import CheckpointFileError, FileTensor, StoredFile, decode_tensor, piece_name, read_tensors
from ....plan import BlockKey
from ..patcher_memory import PolicyMemory
from .block_lists import SMALLEST_BLOCK, SMALLEST_MODEL, find_blocks, refusal
from .build import build_model
from .entries import Dtypes, Entry, dtype_of, entries, parameters
from .layers import inner_tensors, is_joined, joined
from .weights import STACK, NativeWeights

LARGE_PARAMETER = 1_000_000
"""Smallest block parameter in bytes that streams without being a Linear matrix: stacks of experts."""

Places: TypeAlias = Mapping[str, FileTensor]
"""Parameter places in the file by piece. A single piece has no name."""


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
    smallest_block: int = SMALLEST_BLOCK,
    smallest_model: int = SMALLEST_MODEL,
    large_parameter: int = LARGE_PARAMETER,
) -> comfy.model_base.BaseModel:
    """Return ComfyUI's model for a file, with `weights` as a `NativeWeights` and `memory` as a `PolicyMemory`.

    `stored` has the streamed tensors by state dict key. They are read when used. Packed GGUF tensors have no values.

    Args:
        path: a safetensors or GGUF file.
        weight_dtype: one of `WEIGHT_DTYPES`.
        smallest_block: bytes of the smallest block that streams.
        smallest_model: block bytes of the smallest model that is streamed.
        large_parameter: see `LARGE_PARAMETER`.

    Raises:
        CheckpointFileError: the file cannot be read, is not a model that ComfyUI detects, or has no blocks to stream.
    """
    file = StoredFile(path)
    model, dtypes = build_model(path, file, weight_dtype)
    linear: Any = (nn.Linear, model.model_config.custom_operations.Linear)
    located = {
        entry.place: places
        for entry in parameters(model.diffusion_model)
        if (_is_matrix(entry, linear) or (entry.tensor.dim() > 2 and entry.tensor.nbytes >= large_parameter))
        and (places := _locate(entry.tensor, file))
    }

    def matrix_bytes(module: nn.Module) -> int:
        # Other large parameters stream with their block, but convolutions alone are not blocks.
        matrices = (entry.place for entry in parameters(module) if _is_matrix(entry, linear))
        return sum(place.nbytes for matrix in matrices for place in located.get(matrix, {}).values())

    blocks = find_blocks(model.diffusion_model, matrix_bytes, smallest=smallest_block)
    nbytes = sum(map(matrix_bytes, blocks.values()))
    if nbytes < max(1, smallest_model):
        limits = {"smallest_block": smallest_block, "smallest_model": smallest_model}
        total = sum(map(matrix_bytes, find_blocks(model.diffusion_model, matrix_bytes, smallest=1).values()))
        remedy = "load it with Load Diffusion Model"
        raise CheckpointFileError(path, refusal(type(model).__name__, total, **limits, remedy=remedy))
    streamed = list(_streamed(blocks, located, dtypes))
    _load_others(model, file, streamed, dtypes)
    model.weights = _weights(path, blocks, streamed, model)
    model.memory = PolicyMemory(f"blocks of {path.name}")
    # ComfyUI drops models from the cache without unloading them first.
    weakref.finalize(model, model.weights.close).atexit = False
    return model


def _load_others(
    model: comfy.model_base.BaseModel, file: StoredFile, streamed: Sequence[_Streamed], dtypes: Dtypes
) -> None:
    """Take the streamed tensors out of the model, and load all others."""
    model.stored = {each.path: each.entry.tensor for each in streamed}
    for each in streamed:
        if is_joined(each.entry.tensor):
            vars(each.entry.module)["streamed"] = (each.entry.tensor,)
        each.entry.replace(torch.empty(each.entry.tensor.shape, dtype=each.dtype, device="meta"))
    absent = {each.entry.place for each in streamed}
    others = [entry for entry in entries(model.diffusion_model) if entry.place not in absent]
    # All at once: a model has a thousand, and most are read faster than a file is opened.
    places = [_places(entry.tensor, file) for entry in others]
    read = read_tensors(
        {_label(number, name): place for number, of_entry in enumerate(places) for name, place in of_entry.items()}
    )
    for number, (entry, of_entry) in enumerate(zip(others, places, strict=True)):
        values = {name: read.pop(_label(number, name)) for name in of_entry}
        _load(entry, file, dtype_of(entry, dtypes), values)


def _label(number: int, name: str) -> str:
    return f"tensor {number} {name}".strip()


def _places(tensor: torch.Tensor, file: StoredFile) -> Places:
    """Return contiguous tensor places, by name for the inner tensors of a quantised weight."""
    inner = inner_tensors(tensor) if is_joined(tensor) else {"": tensor}
    places = {name: file.locate(each) for name, each in inner.items()}
    return {name: place for name, place in places.items() if place is not None}


def _weights(
    path: Path, blocks: Mapping[str, nn.Module], streamed: Iterable[_Streamed], model: nn.Module
) -> NativeWeights:
    matrices: dict[BlockKey, dict[str, FileTensor]] = {}
    quantised: dict[BlockKey, dict[str, torch.Tensor]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for each in streamed:
        for piece, place in each.places.items():
            name = piece_name(each.name, piece) if piece else each.name
            matrices.setdefault(each.key, {})[name] = place
            # Piece bytes are joined to a weight as they are.
            dtype = place.dtype if piece else each.dtype
            if dtypes.setdefault(name, dtype) != dtype:
                found = f"{name} computes in {dtypes[name]} in one block, and in {dtype} in another"
                raise CheckpointFileError(path, found)
        if is_joined(each.entry.tensor):
            quantised.setdefault(each.key, {})[each.name] = each.entry.tensor
    return NativeWeights(
        blocks,
        matrices,
        dtypes,
        quantised,
        outside_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta),
        device=comfy.model_management.get_torch_device(),
    )


def _streamed(
    blocks: Mapping[str, nn.Module], located: Mapping[tuple[int, str], Places], dtypes: Dtypes
) -> Iterator[_Streamed]:
    for index, (block_path, block) in enumerate(blocks.items()):
        for module_path, module in block.named_modules():
            for name, tensor in module.named_parameters(recurse=False):
                entry = Entry(module, name, tensor)
                if entry.place in located:
                    within = f"{module_path}.{name}".lstrip(".")
                    path = f"diffusion_model.{block_path}.{within}"
                    dtype = dtype_of(entry, dtypes)
                    yield _Streamed(BlockKey(STACK, index), within, path, entry, dtype, located[entry.place])


def _is_matrix(entry: Entry, linear: Any) -> bool:
    return entry.tensor.dim() == 2 and isinstance(entry.module, linear)


def _locate(tensor: torch.Tensor, file: StoredFile) -> Places:
    """Return tensor places in the file: a single one, or a quantised weight's large inner tensors as bytes."""
    if not is_joined(tensor):
        place = file.locate(tensor)
        return {} if place is None else {"": place}
    places = {name: file.locate(inner) for name, inner in inner_tensors(tensor).items() if inner.numel() > 1}
    return {
        name: replace(place, dtype=torch.uint8, shape=(place.nbytes,))
        for name, place in places.items()
        if place is not None
    }


def _load(entry: Entry, file: StoredFile, dtype: torch.dtype, values: Mapping[str, torch.Tensor]) -> None:
    """Load a tensor that does not stream into memory, in ComfyUI's dtype for it.

    Args:
        entry: the tensor.
        file: the model file.
        dtype: ComfyUI's dtype.
        values: file values of the tensor, or of inner tensors by name, as far as they are contiguous there.
    """
    tensor = entry.tensor
    if is_joined(tensor):
        inner = inner_tensors(tensor).items()
        entry.replace(joined(tensor, {name: values[name] if name in values else each.clone() for name, each in inner}))
    elif not file.has(tensor):
        if tensor.is_meta:  # not in the file, as logged by ComfyUI
            entry.replace(torch.zeros(tensor.shape, dtype=dtype))
    elif tensor.is_meta:
        place = file.locate(tensor)
        assert place is not None, f"{entry.name} is not a number of whole groups"  # refused when it was loaded
        decoded = torch.empty(tensor.shape, dtype=dtype)
        decode_tensor(values[""], decoded, packing=place.packing)
        entry.replace(decoded)
    else:
        entry.replace(values[""].to(dtype) if values else tensor.detach().to(dtype, copy=True))
