"""Turns a block's stored bytes into what the model computes with, on arrival."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .fp8 import FP8_DTYPES, widen
from .gguf_dequant import QuantFormat, dequantise
from .layout import BlockFormat, tensor_views

# Scaled and packed values pass through fp32 in pieces of about this many: 8 MB of extra memory however large the matrix
# is, and as much again for the integers of packed ones. On a CPU that takes half the time of the formula in one go, and
# 64 Ki to 4 Mi values do equally well; on a GPU every piece is three launches, and ten to thirty where it is packed.
CHUNK_VALUES = 2 * 1024**2


def decode_block(
    raw: torch.Tensor, into: torch.Tensor, block_format: BlockFormat, scales: Mapping[str, torch.Tensor]
) -> None:
    """Decode the stored bytes of one block.

    A scaled tensor becomes exactly `(stored.float() * scale).to(dtype)`, a packed one exactly what its packs hold in
    fp32 `.to(dtype)`, any other exactly `stored.to(dtype)`.

    Args:
        raw: the stored bytes, 1-D uint8 of at least `stored.nbytes`.
        into: 1-D uint8 of at least `computed.nbytes`, on any device; ordered by the current stream there.
        scales: fp32 factors, 0-d or [rows, 1], one for each name in `block_format.scaled`. Where they lie on another
            device than `raw` they are copied on every call.
    """
    assert scales.keys() == block_format.scaled, f"scales of {sorted(scales)}, not of {sorted(block_format.scaled)}"
    stored, computed = tensor_views(raw, block_format.stored), tensor_views(into, block_format.computed)
    for tensor in block_format.stored.tensors:
        name = tensor.name
        decode_tensor(stored[name], computed[name], packing=tensor.packing, scale=scales.get(name))


def decode_tensor(
    stored: torch.Tensor,
    into: torch.Tensor,
    *,
    packing: QuantFormat | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Decode one tensor as `decode_block` does.

    Args:
        stored: as `tensor_views` and `read_tensors` give it; packed values as uint8 [packs, bytes].
        into: contiguous memory of the values' shape in the dtype that is computed with, on any device.
        packing: how the values are packed, if they are.
        scale: fp32, 0-d or [rows, 1], if there is one.
    """
    if packing is not None:
        _dequantise(stored, packing, into)
    elif scale is not None or _is_slow_to_convert(stored, into.dtype):
        _multiply(stored, None if scale is None else scale.to(stored.device), into)
    else:
        into.copy_(stored, non_blocking=True)


def _is_slow_to_convert(stored: torch.Tensor, computed: torch.dtype) -> bool:
    """Whether a CPU is faster through fp32: torch converts these one value after the other."""
    if stored.device.type != "cpu":
        return False
    return stored.dtype in FP8_DTYPES or (stored.dtype, computed) == (torch.float16, torch.bfloat16)


def _dequantise(packs: torch.Tensor, packing: QuantFormat, computed: torch.Tensor) -> None:
    """Write what `packs` hold, through one piece of fp32 memory unless they can be unpacked in place."""
    count = max(1, min(len(packs), CHUNK_VALUES // packing.values))
    in_place = computed.dtype == torch.float32 and computed.device == packs.device
    work = torch.empty(0 if in_place else count, packing.values, dtype=torch.float32, device=packs.device)
    for part, values in zip(packs.split(count), computed.view(-1, packing.values).split(count), strict=True):
        unpacked = values if in_place else work[: len(part)]
        dequantise(part, packing, unpacked)
        if not in_place:
            values.copy_(unpacked, non_blocking=True)


def _multiply(stored: torch.Tensor, scale: torch.Tensor | None, computed: torch.Tensor) -> None:
    """Write `stored * scale` row by row, through one piece of fp32 memory that is used again and again."""
    rows = stored.shape[0]
    rows_at_once = min(rows, max(1, CHUNK_VALUES * rows // stored.numel()))
    shape = (rows_at_once, *stored.shape[1:])
    widens = stored.device.type == "cpu" and stored.dtype in FP8_DTYPES
    work = torch.empty(shape, dtype=torch.float32, device=stored.device)
    bits = torch.empty(shape if widens else 0, dtype=torch.int16, device=stored.device)
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        count = min(rows_at_once, rows - start)
        product = work[:count]
        if widens:
            widen(stored[part], product, bits[:count])
        else:
            product.copy_(stored[part])
        if scale is not None:
            product.mul_(scale if scale.dim() == 0 else scale[part])
        computed[part].copy_(product, non_blocking=True)
