"""Storage of an expert's blocks (as in the file, or fp8), and the device memory that the weights take."""

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
from ..checkpoint.meta_model import FIRST_BLOCK, block_streams, parameter_dtype, parameter_shapes, table_bytes
from ..checkpoint.open import Expert
from .embedder_cache import part_of

STORAGES: tuple[Storage, ...] = ("as stored", "fp8")

logger = logging.getLogger("wanstream.checkpoint")


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Bytes of the streamed matrices of one block, of the largest one where blocks differ."""

    file: int
    """What is read."""
    stored: int
    """What lies in RAM and crosses the bus."""
    computed: int
    """What a buffer takes."""
    decoded: int
    """What a GPU keeps beside the buffers for the stored form of blocks that arrive: 0 where none is decoded."""


def file_format(expert: Expert, index: int, compute_dtype: torch.dtype) -> BlockFormat:
    """Return the format of a block as its file has it."""
    tensors, scales = _streamed(expert, index)
    return block_format(
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
        compute_dtype,
        scaled=scales,
        packings={name: tensor.packing for name, tensor in tensors.items() if tensor.packing is not None},
    )


def kept_format(expert: Expert, index: int, compute_dtype: torch.dtype, storage: Storage) -> BlockFormat:
    """Return the format of a block in RAM and on the bus."""
    fmt = file_format(expert, index, compute_dtype)
    return quantised_format(fmt) if storage == "fp8" else fmt


def block_bytes(experts: Iterable[Expert], compute_dtype: torch.dtype, storage: Storage) -> BlockBytes:
    """Return what the largest block of these experts takes. Reads nothing."""
    kinds = [
        (file_format(expert, index, compute_dtype), kept_format(expert, index, compute_dtype, storage))
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
    """Return the streamed weights of every block, straight from the experts' files."""
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    for name, expert in experts.items():
        for index in range(expert.config.num_layers):
            blocks[BlockKey(name, index)], scales[BlockKey(name, index)] = _streamed(expert, index)
    files = FileSource(blocks, computed_dtypes=compute_dtype, scales=scales, direct=direct)
    return QuantisedSource(files) if any(_quantises(expert, storage) for expert in experts.values()) else files


def segment_of(source: FileSource | QuantisedSource) -> SharedSegment:
    """Room for the blocks of a source in memory that the ranks of one machine share; blocks come as they are read.

    Raises:
        SourceError: the system has no such memory, or refuses it.
    """
    return SharedSegment(source.identity, {key: source.block_format(key).stored.nbytes for key in source.keys()})


def tell_what_stays(experts: Iterable[Expert], storage: Storage) -> None:
    """Say in the log which experts fp8 storage leaves as they are."""
    for path in dict.fromkeys(expert.path for expert in experts if not _quantises(expert, storage)):
        if storage == "fp8":
            logger.info("%s: storage fp8 changes nothing here, the blocks are fp8 or packed (GGUF) already", path)


def _quantises(expert: Expert, storage: Storage) -> bool:
    return row_scale_bytes([expert], storage) > 0


def _streamed(expert: Expert, index: int) -> tuple[dict[str, FileTensor], dict[str, FileTensor]]:
    """The streamed tensors of one block and their scales, by their names within the block."""
    names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
    tensors = {name: expert.weights[full] for name, full in names.items()}
    return tensors, {name: expert.scales[full] for name, full in names.items() if full in expert.scales}


EXPERTS = ("high", "low")


def device_bytes(
    config: WanConfig, *, compute_dtype: torch.dtype, policy: OffloadPolicy, experts: Iterable[str] = EXPERTS
) -> int:
    """Bytes of these experts, all of that shape: the pool of buffers, and everything that stays.

    What embeds time and text is there for a moment only, when a step's working memory is free: see `embedder_cache.py`.

    Raises ValueError when the policy does not fit the number of blocks.
    """
    counts = dict.fromkeys(experts, config.num_layers)
    _, buffers = plan_residency(policy, counts)
    shapes, streams = parameter_shapes(config), block_streams(config)
    buffer = flat_layout((name, shapes[FIRST_BLOCK + name], compute_dtype) for name in streams)
    streamed = {f"blocks.{index}.{name}" for index in range(config.num_layers) for name in streams}
    staying = sum(
        math.prod(shape) * parameter_dtype(name, compute_dtype).itemsize
        for name, shape in shapes.items()
        if name not in streamed and part_of(name) is None
    )
    return buffers * buffer.nbytes + len(counts) * (staying + table_bytes(config))


def shards_bytes(sharded: Sharded | None, *, blocks: int, stored_bytes: int, on_gpu: bool) -> int:
    """Device memory of shards that are gathered: of all blocks where they stay there, else of those on their way."""
    if sharded is None:
        return 0
    shard = shard_bytes(stored_bytes, sharded.gather.size)
    if sharded.on_device:
        return shard * blocks
    return RAW_SLOTS * shard if on_gpu else 0
