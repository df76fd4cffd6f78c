"""Native ComfyUI models whose blocks stay in their file: opening reads headers, and what lies outside the blocks."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
    copy_together,
    decode_tensor,
    piece_name,
    read_tensors,
)
from ...plan import BlockKey, MeasuredBlocks
from ...schema import OffloadPolicy
from .block_lists import SMALLEST_BLOCK, SMALLEST_MODEL, find_blocks
from .patcher_memory import PolicyMemory
from .streamed_operations import inner_tensors, is_joined, joined, streamed_operations

STACK = "model"
"""Name of the one stack of all blocks: lists of a model may run interleaved."""

WEIGHT_DTYPES: Mapping[str, torch.dtype | None] = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Choices of ComfyUI's own loader: None keeps the dtype of the file where the device computes with it."""


LARGE_PARAMETER = 1_000_000
"""Bytes of the smallest parameter of a block that streams without being the matrix of a Linear: stacks of experts."""

QUANTISATION = "_quantization_metadata"
"""Field of a safetensors file with the format of each quantised layer."""

ARCHITECTURE = "general.architecture"
"""Field of a GGUF file."""

Dtypes: TypeAlias = Mapping[tuple[int, str], torch.dtype]
"""Dtype in which ComfyUI keeps each tensor of a model, by `Entry.place`."""

Places: TypeAlias = Mapping[str, FileTensor]
"""Places of a parameter in its file by piece: the only one has no name."""


class Entry(NamedTuple):
    """One parameter or buffer of a model."""

    module: nn.Module
    name: str
    """Name within the module."""
    tensor: torch.Tensor

    @property
    def place(self) -> tuple[int, str]:
        """The `id` of the module and the name."""
        return id(self.module), self.name

    def replace(self, tensor: torch.Tensor) -> None:
        if self.name in self.module._buffers:
            self.module._buffers[self.name] = tensor
        else:
            store: dict[str, Any] = self.module._parameters
            store[self.name] = tensor if is_joined(tensor) else nn.Parameter(tensor, requires_grad=False)


class NativeWeights:
    """Weights of one native model: matrices of the blocks stream from the file, all other tensors are loaded.

    Args:
        blocks: modules of the blocks by path in the diffusion model; their streamed tensors are on `meta`.
        matrices: place of each streamed tensor in its file, by name within its block.
        dtypes: dtype of each of them to compute with.
        quantised: quantised weights by name within their block, which are joined from pieces in `matrices`.
        outside_bytes: bytes of all tensors that do not stream.
        device: device to compute on.

    Attributes:
        blocks, outside_bytes: as above.
        buffer_bytes: bytes of one buffer.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        matrices: Mapping[BlockKey, Mapping[str, FileTensor]],
        dtypes: Mapping[str, torch.dtype],
        quantised: Mapping[BlockKey, Mapping[str, torch.Tensor]],
        *,
        outside_bytes: int,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self._matrices, self._dtypes, self._quantised = matrices, dtypes, quantised
        self.outside_bytes = outside_bytes
        self._engine: OffloadEngine | None = None
        self._policy: OffloadPolicy | None = None
        source = self._source()
        formats = source.formats.values()
        source.close()
        self.buffer_bytes = max(fmt.computed.nbytes for fmt in formats)
        self._stored_bytes = max(fmt.stored.nbytes for fmt in formats)
        self._decodes = not all(fmt.is_raw for fmt in formats)
        self._has_bus = runtime_for(device) is not None
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
        return 0 if self._engine is None else self._engine.loaded_bytes + self.outside_bytes

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def loaded_engine(self) -> OffloadEngine:
        """The engine; ComfyUI must have loaded the model."""
        assert self._engine is not None, "ComfyUI has not loaded the model"
        return self._engine

    @property
    def measured_blocks(self) -> MeasuredBlocks:
        """Sizes of the blocks, for a policy that is chosen by measuring."""
        return MeasuredBlocks(
            stack=STACK,
            blocks=len(self.blocks),
            stored_bytes=self._stored_bytes,
            buffer_bytes=self.buffer_bytes,
            outside_bytes=self.outside_bytes,
            decodes=self._decodes,
            decoding_bytes=self._decoding_bytes,
            has_bus=self._has_bus,
        )

    def device_bytes(self, policy: OffloadPolicy) -> int:
        return self.measured_blocks.device_bytes(policy)

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
                    join=partial(_join, self._quantised, self._scales_on(device)),
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

    def _scales_on(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return the tensors of quantised weights that do not stream: scales of whole matrices."""
        return copy_together(
            {
                _resident_name(key, name, inner): tensor
                for key, weights in self._quantised.items()
                for name, weight in weights.items()
                for inner, tensor in inner_tensors(weight).items()
                if piece_name(name, inner) not in self._matrices[key]
            },
            device,
        )


def _resident_name(key: BlockKey, name: str, inner: str) -> str:
    return piece_name(f"{key.block}.{name}", inner)


def _join(
    quantised: Mapping[BlockKey, Mapping[str, torch.Tensor]],
    scales: Mapping[str, torch.Tensor],
    key: BlockKey,
    name: str,
    pieces: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the quantised weight `name` of a block over its pieces, which are bytes, and its scales on the device."""
    weight, inner = quantised[key][name], {}
    for each, tensor in inner_tensors(weight).items():
        piece = pieces.get(each)
        inner[each] = (
            scales[_resident_name(key, name, each)] if piece is None else piece.view(tensor.dtype).view(tensor.shape)
        )
    return joined(weight, inner)


class _Streamed(NamedTuple):
    """One streamed parameter of a block."""

    key: BlockKey
    name: str
    """Name within the block."""
    path: str
    """Key in the state dict of ComfyUI's model."""
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
    """Return ComfyUI's model of a file; its `weights` are a `NativeWeights`, its `memory` a `PolicyMemory`.

    Its `stored` are the streamed tensors by their key in the model's state dict, as views of the mapped file; those
    that are packed in GGUF have no values.

    Args:
        path: a safetensors or GGUF file.
        weight_dtype: one of `WEIGHT_DTYPES`.
        smallest_block: bytes of the smallest block that streams.
        smallest_model: bytes in blocks of the smallest model that is streamed.
        large_parameter: see `LARGE_PARAMETER`.

    Raises:
        CheckpointFileError: the file cannot be read, is not a model that ComfyUI detects, or has no blocks to stream.
    """
    file = MappedFile(path)
    if file.is_packed and weight_dtype != "default":
        reason = "is a quantised GGUF, whose blocks are decoded to the dtype that computes"
        raise CheckpointFileError(path, f"{reason}: choose the weight type default instead of {weight_dtype}")
    model, dtypes = _build(path, file, weight_dtype)
    linear: Any = (nn.Linear, model.model_config.custom_operations.Linear)
    located = {
        entry.place: places
        for entry in _parameters(model.diffusion_model)
        if (_is_matrix(entry, linear) or (entry.tensor.dim() > 2 and entry.tensor.nbytes >= large_parameter))
        and (places := _locate(entry.tensor, file))
    }

    def matrix_bytes(module: nn.Module) -> int:
        # Other large parameters stream with the block that they are in, but convolutions alone are not blocks.
        matrices = (entry.place for entry in _parameters(module) if _is_matrix(entry, linear))
        return sum(place.nbytes for matrix in matrices for place in located.get(matrix, {}).values())

    blocks = find_blocks(model.diffusion_model, matrix_bytes, smallest=smallest_block)
    nbytes = sum(map(matrix_bytes, blocks.values()))
    if nbytes < max(1, smallest_model):
        kind = f"{type(model).__name__} has {len(blocks)} blocks of at least {smallest_block / 1e6:g} MB in its lists"
        limit = f"with {nbytes / 1e9:.2f} GB, too little to stream (from {smallest_model / 1e9:g} GB on)"
        raise CheckpointFileError(path, f"{kind}, {limit}: load it with Load Diffusion Model")
    streamed = list(_streamed(blocks, located, dtypes))
    _load_others(model, file, streamed, dtypes)
    model.weights = _weights(path, blocks, streamed, model)
    model.memory = PolicyMemory(f"blocks of {path.name}")
    # ComfyUI drops models from its cache without unloading them first.
    weakref.finalize(model, model.weights.close).atexit = False
    return model


def _load_others(
    model: comfy.model_base.BaseModel, file: MappedFile, streamed: Sequence[_Streamed], dtypes: Dtypes
) -> None:
    """Take the tensors that stream out of the model, and load all others."""
    model.stored = {each.path: each.entry.tensor for each in streamed}
    for each in streamed:
        if is_joined(each.entry.tensor):
            vars(each.entry.module)["streamed"] = (each.entry.tensor,)
        each.entry.replace(torch.empty(each.entry.tensor.shape, dtype=each.dtype, device="meta"))
    absent = {each.entry.place for each in streamed}
    for entry in [entry for entry in _entries(model.diffusion_model) if entry.place not in absent]:
        _load(entry, file, _dtype_of(entry, dtypes))


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
            # Bytes of a piece are joined to a weight as they are.
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
                    dtype = _dtype_of(entry, dtypes)
                    yield _Streamed(BlockKey(STACK, index), within, path, entry, dtype, located[entry.place])


def _is_matrix(entry: Entry, linear: Any) -> bool:
    return entry.tensor.dim() == 2 and isinstance(entry.module, linear)


def _locate(tensor: torch.Tensor, file: MappedFile) -> Places:
    """Return the places of a tensor in the file: its only one, or as bytes those of a quantised weight's large ones."""
    if not is_joined(tensor):
        place = file.locate(tensor)
        return {} if place is None else {"": place}
    places = {name: file.locate(inner) for name, inner in inner_tensors(tensor).items() if inner.numel() > 1}
    return {
        name: replace(place, dtype=torch.uint8, shape=(place.nbytes,))
        for name, place in places.items()
        if place is not None
    }


def _parameters(root: nn.Module) -> Iterator[Entry]:
    for module in root.modules():
        yield from (Entry(module, name, tensor) for name, tensor in module.named_parameters(recurse=False))


def _entries(root: nn.Module) -> Iterator[Entry]:
    yield from _parameters(root)
    for module in root.modules():
        yield from (Entry(module, name, tensor) for name, tensor in module.named_buffers(recurse=False))


def _dtype_of(entry: Entry, dtypes: Dtypes) -> torch.dtype:
    """Return the dtype in which ComfyUI keeps a tensor; layers of mixed precision choose it when they are loaded."""
    loaded: torch.dtype = getattr(entry.module, "loaded_dtype", entry.tensor.dtype)
    return dtypes.get(entry.place, loaded)


def _load(entry: Entry, file: MappedFile, dtype: torch.dtype) -> None:
    """Bring a tensor that does not stream into memory, in the dtype that ComfyUI keeps it in."""
    tensor = entry.tensor
    if is_joined(tensor):
        entry.replace(joined(tensor, {name: inner.clone() for name, inner in inner_tensors(tensor).items()}))
    elif not file.has(tensor):
        if tensor.is_meta:  # not in the file, which ComfyUI has logged as missing
            entry.replace(torch.zeros(tensor.shape, dtype=dtype))
    elif tensor.is_meta:
        place = file.locate(tensor)
        assert place is not None, f"{entry.name} is not a number of whole groups"  # refused when it was loaded
        decoded = torch.empty(tensor.shape, dtype=dtype)
        decode_tensor(read_tensors({"": place})[""], decoded, packing=place.packing)
        entry.replace(decoded)
    else:
        entry.replace(tensor.to(dtype, copy=True))


def _build(path: Path, file: MappedFile, weight_dtype: str) -> tuple[comfy.model_base.BaseModel, Dtypes]:
    """Return ComfyUI's model of the file, whose tensors refer to the mapped file, and the dtypes that they should have.

    Raises:
        CheckpointFileError: the file is not a model that ComfyUI detects, or does not fit it.
    """
    management = comfy.model_management
    tensors, metadata = _native_tensors(file)
    _refuse_unknown_formats(path, tensors, metadata)
    config = _detect(tensors, metadata)
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(tensors, "")
        config = None if converted is None else _detect(converted, metadata)
        if converted is None or config is None:
            kind = f"a GGUF of {metadata[ARCHITECTURE]!r}, and " if ARCHITECTURE in metadata else ""
            raise CheckpointFileError(
                path,
                f"is {kind}not a diffusion model that this ComfyUI detects: choose another file, or update ComfyUI",
            )
        tensors = converted
    supported = config.supported_inference_dtypes
    quantised = (config.quant_config if _marks_layers(config) else config.scaled_fp8) is not None
    dtype = WEIGHT_DTYPES[weight_dtype] or management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(tensors),
        supported_dtypes=list(supported),
        weight_dtype=None if quantised else comfy.utils.weight_dtype(tensors),
    )
    cast = management.unet_manual_cast(None if quantised else dtype, management.get_torch_device(), supported)
    if file.is_packed:  # decoded on arrival, so to the dtype that computes
        dtype, cast = cast or dtype, None
    config.set_inference_dtype(dtype, cast)
    if weight_dtype == "fp8_e4m3fn_fast":
        config.optimizations["fp8"] = True
    config.custom_operations = streamed_operations(config.custom_operations or _operations(config, dtype, cast))
    model = config.get_model(tensors, "")
    dtypes = {entry.place: entry.tensor.dtype for entry in _entries(model.diffusion_model)}
    with _referring(model.diffusion_model, path, file):
        try:
            model.load_model_weights(tensors, "")
        except RuntimeError as err:  # torch's error for shapes that differ
            _, *findings = str(err).splitlines()
            first, more = (findings or [str(err)])[0].strip(), f" ({len(findings)} such findings)" * (len(findings) > 1)
            raise CheckpointFileError(path, f"does not fit {type(model).__name__}: {first}{more}") from err
    return model, dtypes


@contextmanager
def _referring(network: nn.Module, path: Path, file: MappedFile) -> Iterator[None]:
    """Let loading refer to the tensors that it gets, which torch would copy to memory, and ComfyUI in some versions."""
    load = network.load_state_dict

    def assign(tensors: Mapping[str, torch.Tensor], strict: bool = True, **_: object) -> Any:
        for name, tensor in tensors.items():
            if tensor.is_meta and tensor.numel() and file.locate(tensor) is None:
                reason = "changes when it loads the model, and its values are packed: use the safetensors version"
                raise CheckpointFileError(path, f"{name} {list(tensor.shape)} is a tensor that ComfyUI {reason}")
        return load(tensors, strict=strict, assign=True)

    network.load_state_dict = assign  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del network.load_state_dict


def _refuse_unknown_formats(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Refuse quantised layers that this ComfyUI does not know: it has no words for them, or takes them for plain."""
    known = getattr(getattr(comfy, "quant_ops", None), "QUANT_ALGOS", {})
    formats = {
        name.removesuffix(".comfy_quant"): json.loads(bytes(marker.tolist())).get("format")
        for name, marker in tensors.items()
        if name.endswith(".comfy_quant")
    }
    if QUANTISATION in metadata and not known:  # newer versions have turned the text to markers
        layers = json.loads(metadata[QUANTISATION]).get("layers", {})
        formats |= {layer: settings.get("format") for layer, settings in layers.items()}
    for layer, found in formats.items():
        if found not in known:
            have = ", ".join(known) or "none of this kind"
            reason = f"which this ComfyUI does not have (it has {have}): update ComfyUI, or use another file"
            raise CheckpointFileError(path, f"layer {layer} is quantised as {found}, {reason}")


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
