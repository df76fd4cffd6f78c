"""Block storage (as in the file or quantised), matrices multiplied as stored, weight memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch

from ...offload.formats import FP8, BlockFormat, EightBit, FileTensor
from ...offload.sources import FileSource, QuantisedSource, quantised_format, quantised_packings
from ...plan.programs import RAW_SLOTS, BlockKey, BlockSize
from ...schema.refs import Arithmetic, Storage
from ..checkpoint import meta_model
from ..checkpoint.detect import WanConfig
from ..checkpoint.open import Expert
from ..checkpoint.quantised_layers import with_scale_behind

STORAGES: tuple[Storage, ...] = get_args(Storage)

MULTIPLIED: Mapping[Arithmetic, frozenset[torch.dtype]] = {
    "decoded": frozenset(),
    "as stored": frozenset({torch.int8, FP8}),
    "int8": frozenset({torch.int8}),
    "fp8": frozenset({FP8}),
}
"""Dtypes of codes multiplied as stored."""

logger = logging.getLogger("wanstream.checkpoint")


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Size of the streamed matrices in the largest block."""

    file: int
    """Bytes read from files."""
    stored: int
    """Bytes in RAM and on the bus."""
    computed: int
    """Buffer bytes."""
    decoded: int
    """GPU memory beyond the buffers for arriving blocks in stored form, in bytes. 0 without
    decoding."""
    quantised_values: int
    """Values in the largest GGUF-quantised part of a block. 0 for other formats."""
    quantised_to: Storage
    """Form of matrices quantised between file and RAM."""
    multiplied: frozenset[torch.dtype]
    """Dtypes of codes multiplied as stored."""
    sizes: tuple[BlockSize, ...]
    """Bytes by block index, the larger of both experts."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of blocks in RAM and in computation."""

    compute_dtype: torch.dtype
    storage: Storage = "as stored"
    arithmetic: Arithmetic = "decoded"
    """Codes to multiply as stored. All other matrices are decoded to `compute_dtype`."""

    @property
    def multiplied(self) -> frozenset[torch.dtype]:
        return MULTIPLIED[self.arithmetic]


def block_bytes(experts: Mapping[str, Expert], precision: Precision) -> BlockBytes:
    """Return the size of these experts' largest block. Reads nothing."""
    formats = _file_source(experts, precision, direct=False).formats
    in_file = [*formats.values()]
    kept = [quantised_format(fmt, precision.storage, precision.multiplied) for fmt in in_file]
    sizes: dict[int, BlockSize] = {}
    for key, stored, fmt in zip(formats, in_file, kept, strict=True):
        size = BlockSize(stored.stored.nbytes, fmt.stored.nbytes, fmt.computed.nbytes)
        # Each size separately, because the experts' files may have different formats.
        before = sizes.get(key.block, size)
        sizes[key.block] = BlockSize(*map(max, before, size))
    is_quantised = any(quantised_packings(fmt, precision.storage) for fmt in in_file)
    return BlockBytes(
        file=max(fmt.stored.nbytes for fmt in in_file),
        stored=max(fmt.stored.nbytes for fmt in kept),
        computed=max(fmt.computed.nbytes for fmt in kept),
        decoded=RAW_SLOTS * max((fmt.stored.nbytes for fmt in kept if not fmt.is_raw), default=0),
        quantised_values=max(fmt.quantised_values for fmt in kept),
        quantised_to=precision.storage if is_quantised else "as stored",
        multiplied=frozenset(
            tensor.packing.dtype
            for fmt in kept
            for tensor in fmt.computed.tensors
            if isinstance(tensor.packing, EightBit)
        ),
        sizes=tuple(sizes[block] for block in range(len(sizes))),
    )


def block_source(
    experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None
) -> FileSource | QuantisedSource:
    """Return a source that reads every block's streamed weights from the expert files."""
    files = _file_source(experts, precision, direct=direct)
    if not any(quantised_packings(fmt, precision.storage) for fmt in files.formats.values()):
        return files
    return QuantisedSource(files, precision.storage, multiplied=precision.multiplied)


def log_unquantised(experts: Iterable[Expert], storage: Storage) -> None:
    """Log experts with blocks unchanged by a quantising storage."""
    if storage == "as stored":
        return
    precision = Precision(compute_dtype=torch.bfloat16, storage=storage)
    for path, expert in {expert.path: expert for expert in experts}.items():
        if block_bytes({"high": expert}, precision).quantised_to == "as stored":
            reason = "the blocks are quantised already"
            logger.info("%s: storage %s changes nothing here, %s", path, storage, reason)


def _file_source(
    experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None
) -> FileSource:
    """Return a source for all streamed weights as in the files, by name in the block."""
    # fp8 that becomes int8 keeps separate scales, which the quantising source reads.
    multiplied = precision.multiplied - ({FP8} if precision.storage == "int8 ConvRot" else set())
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    decoded: dict[BlockKey, frozenset[str]] = {}
    for expert_name, expert in experts.items():
        for index in range(expert.config.num_layers):
            key = BlockKey(expert_name, index)
            names = {
                name: f"blocks.{index}.{name}" for name in meta_model.block_streams(expert.config)
            }
            blocks[key] = {name: expert.weights[full] for name, full in names.items()}
            scales[key] = {
                name: expert.scales[full] for name, full in names.items() if full in expert.scales
            }
            if FP8 in multiplied:
                _put_scales_behind(blocks[key], scales[key])
            decoded[key] = frozenset(
                name for name, full in names.items() if full in expert.full_precision
            )
    return FileSource(
        blocks,
        computed_dtypes=precision.compute_dtype,
        scales=scales,
        multiplied=multiplied,
        decoded=decoded,
        direct=direct,
    )


def _put_scales_behind(block: dict[str, FileTensor], scales: dict[str, FileTensor]) -> None:
    """Move fp8 scales behind their matrices, where the layers read them."""
    for name, scale in list(scales.items()):
        matrix = block[name]
        if matrix.dtype == FP8 and matrix.packing is None:
            block[name] = with_scale_behind(matrix, scale)
            if block[name] is not matrix:
                del scales[name]


def resident_bytes(config: WanConfig, compute_dtype: torch.dtype) -> int:
    """Return an expert's device bytes besides its buffers: parameters and position tables.

    Without the embedders, which are loaded only while a step's working memory is free.
    """
    streamed = meta_model.streamed_parameters(config)
    parameters = sum(
        math.prod(shape) * meta_model.parameter_dtype(name, compute_dtype).itemsize
        for name, shape in meta_model.parameter_shapes(config).items()
        if name not in streamed and meta_model.embedder_part(name) is None
    )
    return parameters + meta_model.table_bytes(config)


def multiplied_layers(formats: Mapping[BlockKey, BlockFormat]) -> dict[str, dict[str, EightBit]]:
    """Return the packing of layers multiplied as stored, by expert and layer.

    A layer name starts with the block number.
    """
    found: dict[str, dict[str, EightBit]] = {}
    for key, fmt in formats.items():
        for tensor in fmt.computed.tensors:
            if isinstance(tensor.packing, EightBit):
                layer = f"{key.block}.{tensor.name.removesuffix('.weight')}"
                found.setdefault(key.expert, {})[layer] = tensor.packing
    return found
