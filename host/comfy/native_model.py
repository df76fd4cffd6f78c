"""Native ComfyUI models whose blocks stay in their file: opening reads headers, and what lies outside the blocks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from torch import nn

from ...devices import compute_device, runtime_for
from ...offload import (
    CheckpointFileError,
    FileSource,
    FileTensor,
    MappedFile,
    OffloadEngine,
    TensorSource,
    attach_offload,
)
from ...plan import BlockKey
from ...schema import OffloadPolicy, plan_residency
from .block_lists import SMALLEST_BLOCK, SMALLEST_MODEL, find_blocks
from .patcher_memory import PolicyMemory
from .streamed_operations import declared_dtype, streamed_operations

STACK = "model"
"""Name of the one stack of all blocks: lists of a model may run interleaved."""

WEIGHT_DTYPES: Mapping[str, torch.dtype | None] = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Choices of ComfyUI's own loader: None keeps the dtype of the file where the device computes with it."""


class Entry(NamedTuple):
    """One parameter of a model."""

    module: nn.Module
    name: str
    """Name within the module."""
    tensor: torch.Tensor


class NativeWeights:
    """Weights of one native model: matrices of the blocks stream from the file, all other tensors are loaded.

    Args:
        blocks: modules of the blocks by path in the diffusion model; their streamed tensors are on `meta`.
        matrices: place of each streamed tensor in its file, by name within its block.
        dtypes: dtype of each of them to compute with.
        outside_bytes: bytes of all tensors that do not stream.
        device: device to compute on.

    Attributes:
        blocks: as above.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        matrices: Mapping[BlockKey, Mapping[str, FileTensor]],
        dtypes: Mapping[str, torch.dtype],
        *,
        outside_bytes: int,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self._matrices, self._dtypes = matrices, dtypes
        self._outside_bytes = outside_bytes
        self._engine: OffloadEngine | None = None
        self._policy: OffloadPolicy | None = None
        source = self._source()
        formats = source.formats.values()
        source.close()
        self._buffer_bytes = max(fmt.computed.nbytes for fmt in formats)
        # A device keeps the stored bytes of the block that is decoded next to its buffer.
        decoded = max((fmt.stored.nbytes for fmt in formats if not fmt.is_raw), default=0)
        self._decoding_bytes = decoded if runtime_for(device) is not None else 0

    @property
    def block_counts(self) -> dict[str, int]:
        return {STACK: len(self.blocks)}

    @property
    def running(self) -> bool:
        return self._engine is not None and self._engine.running

    @property
    def loaded_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.loaded_bytes + self._outside_bytes

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def loaded_engine(self) -> OffloadEngine:
        """The engine; ComfyUI must have loaded the model."""
        assert self._engine is not None, "ComfyUI has not loaded the model"
        return self._engine

    def device_bytes(self, policy: OffloadPolicy) -> int:
        _, buffers = plan_residency(policy, self.block_counts)
        return buffers * self._buffer_bytes + self._decoding_bytes + self._outside_bytes

    def engine(self, policy: OffloadPolicy, device: torch.device) -> OffloadEngine:
        """Return the engine for `policy` on `device`; an existing one is changed and keeps its blocks.

        Raises:
            ValueError: the policy does not fit the number of blocks.
            OSError: there is not enough RAM for the RAM-resident blocks.
        """
        device = compute_device(device)
        if self._engine is not None and self._engine.device != device:
            self.close()
        if self._engine is None:
            # The engine outlives the run that creates it, and inference tensors could not be written in later runs.
            with torch.inference_mode(False):
                self._engine = attach_offload(
                    {STACK: list(self.blocks.values())},
                    policy=policy,
                    device=device,
                    source=self._source(),
                    follow_forward=False,
                )
        elif self._policy != policy:
            self._engine.set_policy(policy)
        self._policy = policy
        return self._engine

    def release_memory(self, nbytes: int) -> int:
        return 0 if self._engine is None else self._engine.release_memory(nbytes)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.detach()

    def _source(self) -> FileSource | TensorSource:
        return FileSource(self._matrices, computed_dtypes=self._dtypes)


def open_native(
    path: Path,
    weight_dtype: str = "default",
    *,
    smallest_block: int = SMALLEST_BLOCK,
    smallest_model: int = SMALLEST_MODEL,
) -> comfy.model_base.BaseModel:
    """Return ComfyUI's model of a file; its `weights` are a `NativeWeights`, its `memory` a `PolicyMemory`.

    Its `stored` are the streamed tensors by their key in the model's state dict, as views of the mapped file.

    Args:
        path: a safetensors file.
        weight_dtype: one of `WEIGHT_DTYPES`.
        smallest_block: bytes of the smallest block that streams.
        smallest_model: bytes in blocks of the smallest model that is streamed.

    Raises:
        CheckpointFileError: the file cannot be read, is not a model that ComfyUI detects, or has no blocks to stream.
    """
    file = MappedFile(path)
    model = _build(path, file, weight_dtype)
    places = {
        id(entry.tensor): place
        for entry in _entries(model.diffusion_model)
        if entry.tensor.dim() > 1 and (place := file.locate(entry.tensor)) is not None
    }

    def matrix_bytes(module: nn.Module) -> int:
        return sum(entry.tensor.nbytes for entry in _entries(module) if id(entry.tensor) in places)

    blocks = find_blocks(model.diffusion_model, matrix_bytes, smallest=smallest_block)
    nbytes = sum(map(matrix_bytes, blocks.values()))
    if not blocks or nbytes < smallest_model:
        limits = f"of at least {smallest_block / 1e6:g} MB with {nbytes / 1e9:.2f} GB"
        reason = (
            f"{type(model).__name__} has {len(blocks)} blocks {limits}; streaming is for {smallest_model / 1e9:g} GB"
        )
        raise CheckpointFileError(path, f"{reason} and more: load it with Load Diffusion Model")
    streamed = list(_streamed(blocks, places))
    matrices: dict[BlockKey, dict[str, FileTensor]] = {}
    model.stored = {}
    for each in streamed:
        matrices.setdefault(each.key, {})[each.name] = places[id(each.entry.tensor)]
        model.stored[each.path] = each.entry.tensor
        _replace(each.entry, torch.empty(each.entry.tensor.shape, dtype=each.dtype, device="meta"))
    absent = {id(each.entry.module._parameters[each.entry.name]) for each in streamed}
    for entry in [entry for entry in _entries(model.diffusion_model) if id(entry.tensor) not in absent]:
        _load(entry, file)
    model.weights = NativeWeights(
        blocks,
        matrices,
        _common_dtypes(path, streamed),
        outside_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta),
        device=comfy.model_management.get_torch_device(),
    )
    model.memory = PolicyMemory(f"blocks of {path.name}")
    # ComfyUI drops models from its cache without unloading them first.
    weakref.finalize(model, model.weights.close).atexit = False
    return model


def _common_dtypes(path: Path, streamed: Iterable[_Streamed]) -> dict[str, torch.dtype]:
    """Return the compute dtype of each name within a block."""
    dtypes: dict[str, torch.dtype] = {}
    for each in streamed:
        if dtypes.setdefault(each.name, each.dtype) != each.dtype:
            found = f"{each.name} computes in {dtypes[each.name]} in one block, and in {each.dtype} in another"
            raise CheckpointFileError(path, found)
    return dtypes


class _Streamed(NamedTuple):
    """One streamed tensor of a block."""

    key: BlockKey
    name: str
    """Name within the block."""
    path: str
    """Key in the state dict of ComfyUI's model."""
    dtype: torch.dtype
    """Dtype to compute with."""
    entry: Entry


def _streamed(blocks: Mapping[str, nn.Module], places: Mapping[int, FileTensor]) -> Iterator[_Streamed]:
    for index, (block_path, block) in enumerate(blocks.items()):
        for module_path, module in block.named_modules():
            for entry in _own_entries(module):
                if id(entry.tensor) in places:
                    name = f"{module_path}.{entry.name}".lstrip(".")
                    path = f"diffusion_model.{block_path}.{name}"
                    dtype = declared_dtype(module, entry.name, entry.tensor)
                    yield _Streamed(BlockKey(STACK, index), name, path, dtype, entry)


def _own_entries(module: nn.Module) -> Iterator[Entry]:
    yield from (Entry(module, name, tensor) for name, tensor in module.named_parameters(recurse=False))


def _entries(root: nn.Module) -> Iterator[Entry]:
    for module in root.modules():
        yield from _own_entries(module)


def _replace(entry: Entry, tensor: torch.Tensor) -> None:
    entry.module._parameters[entry.name] = nn.Parameter(tensor, requires_grad=False)


def _load(entry: Entry, file: MappedFile) -> None:
    """Bring a tensor that does not stream into memory, in the dtype that ComfyUI keeps it in."""
    dtype = declared_dtype(entry.module, entry.name, entry.tensor)
    if entry.tensor.is_meta:  # not in the file, which ComfyUI has logged as missing
        _replace(entry, torch.zeros(entry.tensor.shape, dtype=dtype))
    elif file.locate(entry.tensor) is not None:
        _replace(entry, entry.tensor.to(dtype, copy=True))


def _build(path: Path, file: MappedFile, weight_dtype: str) -> comfy.model_base.BaseModel:
    """Return ComfyUI's model of the file, whose Linear layers refer to the mapped file."""
    management = comfy.model_management
    tensors, metadata = _native_tensors(file)
    config = _detect(tensors, metadata)
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(tensors, "")
        config = None if converted is None else _detect(converted, metadata)
        if converted is None or config is None:
            raise CheckpointFileError(path, "is not a diffusion model that this ComfyUI detects: update ComfyUI")
        tensors = converted
    supported = config.supported_inference_dtypes
    quantised = (config.quant_config if _marks_layers(config) else config.scaled_fp8) is not None
    dtype = WEIGHT_DTYPES[weight_dtype] or management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(tensors),
        supported_dtypes=list(supported),
        weight_dtype=None if quantised else comfy.utils.weight_dtype(tensors),
    )
    cast = management.unet_manual_cast(None if quantised else dtype, management.get_torch_device(), supported)
    config.set_inference_dtype(dtype, cast)
    if weight_dtype == "fp8_e4m3fn_fast":
        config.optimizations["fp8"] = True
    config.custom_operations = streamed_operations(config.custom_operations or _operations(config, dtype, cast))
    model = config.get_model(tensors, "")
    try:
        model.load_model_weights(tensors, "")
    except RuntimeError as err:  # torch's error for shapes that differ
        raise CheckpointFileError(path, f"does not fit {type(model).__name__}: {err}") from err
    return model


def _native_tensors(file: MappedFile) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata with the prefix of a whole checkpoint removed and older quantised layers marked."""
    tensors, metadata = dict(file.tensors), dict(file.metadata)
    convert = getattr(comfy.utils, "convert_old_quants", None)  # missing in 0.3.64, which has no marked layers
    if convert is not None:
        tensors, metadata = convert(tensors, "", metadata=metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    below = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
    if not below:
        return tensors, metadata
    return convert(below, "", metadata=metadata) if convert is not None else (below, metadata)


def _detect(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Any:
    """Return ComfyUI's configuration of the model; None if it detects none."""
    detect = comfy.model_detection.model_config_from_unet
    takes_metadata = "metadata" in inspect.signature(detect).parameters
    return detect(tensors, "", **({"metadata": metadata} if takes_metadata else {}))


def _operations(config: Any, dtype: torch.dtype, cast: torch.dtype | None) -> Any:
    """Return the layers that ComfyUI would choose for this configuration."""
    if _marks_layers(config):
        fast = config.optimizations.get("fp8", False)
        return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, model_config=config)
    fast = config.optimizations.get("fp8", config.scaled_fp8 is not None)
    return comfy.ops.pick_operations(dtype, cast, fp8_optimizations=fast, scaled_fp8=config.scaled_fp8)


def _marks_layers(config: Any) -> bool:
    """Return True if this ComfyUI has quantised layers that are marked one by one; 0.3.64 has only fp8 with scales."""
    return hasattr(type(config), "quant_config")  # of the type: a configuration warns of attributes that it lacks
