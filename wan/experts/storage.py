"""Storage of blocks (as in the file, or fp8) and memory that weights need."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...offload import (
    BlockFormat,
    FileSource,
    FileTensor,
    QuantisedSource,
    Sharded,
    SharedSegment,
    block_format,
    flat_layout,
    quantised_format,
    scale_bytes,
    shard_bytes,
)
from ...plan import RAW_SLOTS, BlockKey
from ...schema import OffloadPolicy, Storage, plan_residency
from ..checkpoint.detect import WanConfig
from ..checkpoint.meta_model import (
    FIRST_BLOCK,
    block_streams,
    embedder_part,
    parameter_dtype,
    parameter_shapes,
    table_bytes,
)
from ..checkpoint.open import Expert

STORAGES: tuple[Storage, ...] = ("as stored", "fp8")

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


def file_format(expert: Expert, index: int, compute_dtype: torch.dtype) -> BlockFormat:
    """Return the format of a block in its file."""
    tensors, scales = _streamed(expert, index)
    return block_format(
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
        compute_dtype,
        scaled=scales,
        packings={name: tensor.packing for name, tensor in tensors.items() if tensor.packing is not None},
    )


def stored_format(expert: Expert, index: int, compute_dtype: torch.dtype, storage: Storage) -> BlockFormat:
    """Return the format of a block in RAM and on the bus."""
    fmt = file_format(expert, index, compute_dtype)
    return quantised_format(fmt) if storage == "fp8" else fmt


def block_bytes(experts: Iterable[Expert], compute_dtype: torch.dtype, storage: Storage) -> BlockBytes:
    """Return the bytes of the largest block of these experts. Reads nothing."""
    kinds = [
        (file_format(expert, index, compute_dtype), stored_format(expert, index, compute_dtype, storage))
        for expert in experts
        for index in range(expert.config.num_layers)
    ]
    return BlockBytes(
        file=max(before.stored.nbytes for before, _ in kinds),
        stored=max(kept.stored.nbytes for _, kept in kinds),
        computed=max(kept.computed.nbytes for _, kept in kinds),
        decoded=RAW_SLOTS * max((kept.stored.nbytes for _, kept in kinds if not kept.is_raw), default=0),
    )


def row_scale_bytes(experts: Iterable[Expert], storage: Storage) -> int:
    """Return the bytes of the scales that fp8 storage adds, of all blocks of these experts."""
    if storage != "fp8":
        return 0
    return sum(
        scale_bytes(file_format(expert, index, torch.bfloat16))
        for expert in experts
        for index in range(expert.config.num_layers)
    )


def block_source(
    experts: Mapping[str, Expert], *, compute_dtype: torch.dtype, storage: Storage, direct: bool | None
) -> FileSource | QuantisedSource:
    """Return the source of every block's streamed weights, which reads the experts' files."""
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    for name, expert in experts.items():
        for index in range(expert.config.num_layers):
            blocks[BlockKey(name, index)], scales[BlockKey(name, index)] = _streamed(expert, index)
    files = FileSource(blocks, computed_dtypes=compute_dtype, scales=scales, direct=direct)
    return QuantisedSource(files) if any(_quantises(expert, storage) for expert in experts.values()) else files


def make_shared_segment(source: FileSource | QuantisedSource) -> SharedSegment:
    """Return memory for the blocks of a source that the ranks of one machine share.

    Raises:
        SourceError: the system has no shared memory, or refuses it.
    """
    return SharedSegment(source.identity, {key: source.block_format(key).stored.nbytes for key in source.keys()})


def log_unquantised(experts: Iterable[Expert], storage: Storage) -> None:
    """Log the experts whose blocks fp8 storage does not change."""
    for path in dict.fromkeys(expert.path for expert in experts if not _quantises(expert, storage)):
        if storage == "fp8":
            logger.info("%s: storage fp8 changes nothing here, the blocks are fp8 or packed (GGUF) already", path)


def _quantises(expert: Expert, storage: Storage) -> bool:
    return row_scale_bytes([expert], storage) > 0


def _streamed(expert: Expert, index: int) -> tuple[dict[str, FileTensor], dict[str, FileTensor]]:
    """Return the streamed tensors of one block and their scales, by name within the block."""
    names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
    tensors = {name: expert.weights[full] for name, full in names.items()}
    return tensors, {name: expert.scales[full] for name, full in names.items() if full in expert.scales}


EXPERTS = ("high", "low")


def device_bytes(
    config: WanConfig, *, compute_dtype: torch.dtype, policy: OffloadPolicy, experts: Iterable[str] = EXPERTS
) -> int:
    """Return the device bytes of experts with this config: buffers, resident parameters and position tables.

    The embedders are not included: they are loaded only while the working memory of a step is free.

    Raises:
        ValueError: the policy does not fit the number of blocks.
    """
    counts = dict.fromkeys(experts, config.num_layers)
    _, buffers = plan_residency(policy, counts)
    shapes, streams = parameter_shapes(config), block_streams(config)
    buffer = flat_layout((name, shapes[FIRST_BLOCK + name], compute_dtype) for name in streams)
    streamed = {f"blocks.{index}.{name}" for index in range(config.num_layers) for name in streams}
    resident = sum(
        math.prod(shape) * parameter_dtype(name, compute_dtype).itemsize
        for name, shape in shapes.items()
        if name not in streamed and embedder_part(name) is None
    )
    return buffers * buffer.nbytes + len(counts) * (resident + table_bytes(config))


def shards_bytes(sharded: Sharded | None, *, blocks: int, stored_bytes: int, on_gpu: bool) -> int:
    """Return the device bytes of gathered shards: of all blocks if resident there, else of those in transit."""
    if sharded is None:
        return 0
    shard = shard_bytes(stored_bytes, sharded.gather.size)
    if sharded.on_device:
        return shard * blocks
    return RAW_SLOTS * shard if on_gpu else 0
