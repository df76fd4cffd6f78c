"""Storage of blocks (as in the file, or fp8) and memory that weights need."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...offload import (
    FileSource,
    FileTensor,
    Int8,
    QuantisedSource,
    Sharded,
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
    streamed_parameters,
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
    row_scales: int
    """Bytes of the scales that fp8 storage adds, of all blocks."""
    quantised_values: int
    """Values of the largest part of a block that is GGUF-quantised; 0 for other formats."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of blocks in RAM and in the computation."""

    compute_dtype: torch.dtype
    storage: Storage = "as stored"
    int8: bool = False
    """Matrices that are stored in int8 are computed in it; others in `compute_dtype`."""


def block_bytes(experts: Mapping[str, Expert], precision: Precision) -> BlockBytes:
    """Return the bytes of the largest block of these experts. Reads nothing."""
    files, storage = _file_source(experts, precision, direct=False), precision.storage
    in_file = [*files.formats.values()]
    kept = [quantised_format(fmt) for fmt in in_file] if storage == "fp8" else in_file
    return BlockBytes(
        file=max(fmt.stored.nbytes for fmt in in_file),
        stored=max(fmt.stored.nbytes for fmt in kept),
        computed=max(fmt.computed.nbytes for fmt in kept),
        decoded=RAW_SLOTS * max((fmt.stored.nbytes for fmt in kept if not fmt.is_raw), default=0),
        row_scales=sum(map(scale_bytes, in_file)) if storage == "fp8" else 0,
        quantised_values=max(fmt.quantised_values for fmt in kept),
    )


def block_source(
    experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None
) -> FileSource | QuantisedSource:
    """Return the source of every block's streamed weights, which reads the experts' files."""
    files = _file_source(experts, precision, direct=direct)
    quantises = precision.storage == "fp8" and any(map(scale_bytes, files.formats.values()))
    return QuantisedSource(files) if quantises else files


def log_unquantised(experts: Iterable[Expert], storage: Storage) -> None:
    """Log the experts whose blocks fp8 storage does not change."""
    for path, expert in {expert.path: expert for expert in experts}.items():
        precision = Precision(compute_dtype=torch.bfloat16, storage=storage)
        if storage == "fp8" and not block_bytes({"high": expert}, precision).row_scales:
            logger.info("%s: storage fp8 changes nothing here, the blocks are quantised already", path)


def _file_source(experts: Mapping[str, Expert], precision: Precision, *, direct: bool | None) -> FileSource:
    """Return the source of every block's streamed weights as they are in the files, by name within the block."""
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    scales: dict[BlockKey, dict[str, FileTensor]] = {}
    for expert_name, expert in experts.items():
        for index in range(expert.config.num_layers):
            key = BlockKey(expert_name, index)
            names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
            blocks[key] = {name: expert.weights[full] for name, full in names.items()}
            scales[key] = {name: expert.scales[full] for name, full in names.items() if full in expert.scales}
    return FileSource(
        blocks, computed_dtypes=precision.compute_dtype, scales=scales, int8=precision.int8, direct=direct
    )


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


def int8_layers(expert: Expert) -> dict[str, dict[str, int]]:
    """Return the layers of each block whose matrix is stored in int8, and the columns that it was rotated in."""
    layers: dict[str, dict[str, int]] = {}
    for index in range(expert.config.num_layers):
        for name in block_streams(expert.config):
            packing = expert.weights[f"blocks.{index}.{name}"].packing
            if isinstance(packing, Int8):
                layers.setdefault(str(index), {})[name.removesuffix(".weight")] = packing.group
    return layers
