"""Storage of blocks (as in the file, or quantised), matrices that are multiplied as stored, and memory of weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch

from ...offload import (
    FP8,
    BlockFormat,
    EightBit,
    FileSource,
    FileTensor,
    QuantisedSource,
    Sharded,
    flat_layout,
    quantised_format,
    quantised_packings,
    shard_bytes,
)
from ...plan import RAW_SLOTS, BlockKey
from ...schema import Arithmetic, OffloadPolicy, Storage, plan_residency
from ..checkpoint.detect import WanConfig
from ..checkpoint.meta_model import (
    FIRST_BLOCK,
    block_streams,
    embedder_part,
    parameter_dtype,
    parameter_shapes,
    streamed_parameters,
    table_bytes,
)
from ..checkpoint.open import Expert
from ..checkpoint.quantised_layers import with_scale_behind

STORAGES: tuple[Storage, ...] = get_args(Storage)

MULTIPLIED: Mapping[Arithmetic, frozenset[torch.dtype]] = {
    "decoded": frozenset(),
    "as stored": frozenset({torch.int8, FP8}),
    "int8": frozenset({torch.int8}),
    "fp8": frozenset({FP8}),
}
"""Dtypes of codes that are multiplied as they are stored."""

logger = logging.getLogger("wanstream.checkpoint")


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Bytes of the streamed matrices of the largest block."""

    file: int
    """Bytes read from files."""
    stored: int
    """Bytes in RAM and on the bus."""
    computed: int
    """Bytes of a buffer."""
    decoded: int
    """Bytes of GPU memory, in addition to the buffers, for the stored form of arriving blocks; 0 without decoding."""
    quantised_values: int
    """Values of the largest part of a block that is GGUF-quantised; 0 for other formats."""
    quantised: bool
    """True if a matrix is quantised between file and RAM."""
    multiplied: frozenset[torch.dtype]
    """Dtypes of the codes that are multiplied as they are stored."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of blocks in RAM and in the computation."""

    compute_dtype: torch.dtype
    storage: Storage = "as stored"
    arithmetic: Arithmetic = "decoded"
    """Codes that are multiplied as they are stored; all other matrices are decoded to `compute_dtype`."""

    @property
    def multiplied(self) -> frozenset[torch.dtype]:
        return MULTIPLIED[self.arithmetic]


def block_bytes(experts: Mapping[str, Expert], precision: Precision) -> BlockBytes:
    """Return the bytes of the largest block of these experts. Reads nothing."""
    in_file = [*_file_source(experts, precision, direct=False).formats.values()]
    kept = [quantised_format(fmt, precision.storage, precision.multiplied) for fmt in in_file]
    return BlockBytes(
        file=max(fmt.stored.nbytes for fmt in in_file),
        stored=max(fmt.stored.nbytes for fmt in kept),
        computed=max(fmt.computed.nbytes for fmt in kept),
        decoded=RAW_SLOTS * max((fmt.stored.nbytes for fmt in kept if not fmt.is_raw), default=0),
        quantised_values=max(fmt.quantised_values for fmt in kept),
        quantised=any(quantised_packings(fmt, precision.storage) for fmt in in_file),
        multiplied=frozenset(
            tensor.packing.dtype
            for fmt in kept
            for tensor in fmt.computed.tensors
            if isinstance(tensor.packing, EightBit)
        ),
    )


def block_source(
    experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None
) -> FileSource | QuantisedSource:
    """Return the source of every block's streamed weights, which reads the experts' files."""
    files = _file_source(experts, precision, direct=direct)
    if not any(quantised_packings(fmt, precision.storage) for fmt in files.formats.values()):
        return files
    return QuantisedSource(files, precision.storage, multiplied=precision.multiplied)


def log_unquantised(experts: Iterable[Expert], storage: Storage) -> None:
    """Log the experts whose blocks a quantising storage does not change."""
    for path, expert in {expert.path: expert for expert in experts}.items():
        files = _file_source({"high": expert}, Precision(compute_dtype=torch.bfloat16), direct=False)
        if storage != "as stored" and not any(quantised_packings(fmt, storage) for fmt in files.formats.values()):
            logger.info("%s: storage %s changes nothing here, the blocks are quantised already", path, storage)


def _file_source(experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None) -> FileSource:
    """Return the source of every block's streamed weights as they are in the files, by name within the block."""
    # fp8 that becomes int8 keeps its scales apart, where the quantising source reads them.
    multiplied = precision.multiplied - ({FP8} if precision.storage == "int8 ConvRot" else set())
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    decoded: dict[BlockKey, frozenset[str]] = {}
    for expert_name, expert in experts.items():
        for index in range(expert.config.num_layers):
            key = BlockKey(expert_name, index)
            names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
            blocks[key] = {name: expert.weights[full] for name, full in names.items()}
            scales[key] = {name: expert.scales[full] for name, full in names.items() if full in expert.scales}
            if FP8 in multiplied:
                _put_scales_behind(blocks[key], scales[key])
            decoded[key] = frozenset(name for name, full in names.items() if full in expert.full_precision)
    return FileSource(
        blocks,
        computed_dtypes=precision.compute_dtype,
        scales=scales,
        multiplied=multiplied,
        decoded=decoded,
        direct=direct,
    )


def _put_scales_behind(block: dict[str, FileTensor], scales: dict[str, FileTensor]) -> None:
    """Move the scales of fp8 matrices behind them, into the bytes that the layers compute with."""
    for name, scale in list(scales.items()):
        matrix = block[name]
        if matrix.dtype == FP8 and matrix.packing is None:
            block[name] = with_scale_behind(matrix, scale)
            if block[name] is not matrix:
                del scales[name]


EXPERTS = ("high", "low")


def device_bytes(
    config: WanConfig,
    *,
    compute_dtype: torch.dtype,
    policy: OffloadPolicy,
    experts: Iterable[str] = EXPERTS,
    buffer_bytes: int | None = None,
) -> int:
    """Return the device bytes of experts with this config: buffers, resident parameters and position tables.

    A buffer has `buffer_bytes`; by default all matrices of a block in `compute_dtype`.

    The embedders are not included: they are loaded only while the working memory of a step is free.

    Raises:
        ValueError: the policy does not fit the number of blocks.
    """
    counts = dict.fromkeys(experts, config.num_layers)
    _, buffers = plan_residency(policy, counts)
    shapes = parameter_shapes(config)
    if buffer_bytes is None:
        streams = ((name, shapes[FIRST_BLOCK + name], compute_dtype) for name in block_streams(config))
        buffer_bytes = flat_layout(streams).nbytes
    streamed = streamed_parameters(config)
    resident = sum(
        math.prod(shape) * parameter_dtype(name, compute_dtype).itemsize
        for name, shape in shapes.items()
        if name not in streamed and embedder_part(name) is None
    )
    return buffers * buffer_bytes + len(counts) * (resident + table_bytes(config))


def shards_bytes(sharded: Sharded | None, *, blocks: int, stored_bytes: int, on_gpu: bool) -> int:
    """Return the device bytes of gathered shards: of all blocks if resident there, else of those in transit."""
    if sharded is None:
        return 0
    shard = shard_bytes(stored_bytes, sharded.gather.size)
    if sharded.on_device:
        return shard * blocks
    return RAW_SLOTS * shard if on_gpu else 0


def multiplied_layers(formats: Mapping[BlockKey, BlockFormat]) -> dict[str, dict[str, dict[str, EightBit]]]:
    """Return the packing of the layers whose codes are multiplied as they are stored, by expert, block and layer."""
    found: dict[str, dict[str, dict[str, EightBit]]] = {}
    for key, fmt in formats.items():
        for tensor in fmt.computed.tensors:
            if isinstance(tensor.packing, EightBit):
                layers = found.setdefault(key.expert, {}).setdefault(str(key.block), {})
                layers[tensor.name.removesuffix(".weight")] = tensor.packing
    return found
