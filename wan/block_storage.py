"""In which form the blocks of an expert are kept on their way to the model: as their file has them, or in fp8."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..offload.file_source import FileSource
from ..offload.layout import BlockFormat, block_format
from ..offload.quantised_format import quantised_format, scale_bytes
from ..offload.quantised_source import QuantisedSource
from ..offload.safetensors_header import FileTensor
from ..offload.shared_segment import SharedSegment
from ..plan import BlockKey, Storage
from ..plan.memory_needs import RAW_SLOTS
from .checkpoint import Expert
from .meta_model import block_streams

STORAGES: tuple[Storage, ...] = ("as stored", "fp8")

log = logging.getLogger("wanstream.checkpoint")


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
            log.info("%s: storage fp8 changes nothing here, the blocks are fp8 or packed (GGUF) already", path)


def _quantises(expert: Expert, storage: Storage) -> bool:
    return row_scale_bytes([expert], storage) > 0


def _streamed(expert: Expert, index: int) -> tuple[dict[str, FileTensor], dict[str, FileTensor]]:
    """The streamed tensors of one block and their scales, by their names within the block."""
    names = {name: f"blocks.{index}.{name}" for name in block_streams(expert.config)}
    tensors = {name: expert.weights[full] for name, full in names.items()}
    return tensors, {name: expert.scales[full] for name, full in names.items() if full in expert.scales}
