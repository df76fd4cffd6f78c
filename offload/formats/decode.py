"""Decoding of stored bytes to the compute dtype, on arrival of a block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .fp8 import FP8_DTYPES, widen
from .gguf_dequant import QuantFormat, dequantise
from .layout import BlockFormat, tensor_views

# Scaled and quantised values are converted through fp32 in chunks of about this many values. That bounds the extra
# memory to 8 MB for a matrix of any size, plus the same for the integers of quantised ones. On a CPU it takes half the
# time of converting the matrix at once, and 64 Ki to 4 Mi values perform equally; on a GPU a chunk takes three kernel
# launches, or ten to thirty if it is quantised.
CHUNK_VALUES = 2 * 1024**2


def decode_block(
    raw: torch.Tensor, into: torch.Tensor, block_format: BlockFormat, scales: Mapping[str, torch.Tensor]
) -> None:
    """Decode the stored bytes of one block.

    The result is exactly `(stored.float() * scale).to(dtype)` for a scaled tensor, the dequantised fp32 values
    `.to(dtype)` for a GGUF-quantised one, and `stored.to(dtype)` for any other.

    Args:
        raw: the stored bytes, 1-D uint8 of at least `stored.nbytes`.
        into: 1-D uint8 of at least `computed.nbytes`, on any device; ordered by the current stream there.
        block_format: layouts of `raw` and `into`.
        scales: fp32 factors, 0-d or [rows, 1], one for each name in `block_format.scaled`. They are copied on every
            call if they are on another device than `raw`.
    """
    assert scales.keys() == block_format.scaled, f"got scales of {sorted(scales)}, need {sorted(block_format.scaled)}"
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
        stored: as returned by `tensor_views` and `read_tensors`; quantised values as uint8 [groups, bytes].
        into: contiguous memory of the values' shape in the compute dtype, on any device.
        packing: the GGUF format of the values, if they are quantised.
        scale: fp32, 0-d or [rows, 1], if there is one.
    """
    if packing is not None:
        _dequantise(stored, packing, into)
    elif scale is not None or _is_slow_to_convert(stored, into.dtype):
        _multiply(stored, None if scale is None else scale.to(stored.device), into)
    else:
        into.copy_(stored, non_blocking=True)


def _is_slow_to_convert(stored: torch.Tensor, computed: torch.dtype) -> bool:
    """Return True if converting through fp32 is faster: torch converts these dtypes one value at a time on a CPU."""
    if stored.device.type != "cpu":
        return False
    return stored.dtype in FP8_DTYPES or (stored.dtype, computed) == (torch.float16, torch.bfloat16)


def _dequantise(groups: torch.Tensor, packing: QuantFormat, computed: torch.Tensor) -> None:
    """Dequantise in chunks, through one fp32 work tensor unless `computed` is fp32 on the same device."""
    count = max(1, min(len(groups), CHUNK_VALUES // packing.values))
    in_place = computed.dtype == torch.float32 and computed.device == groups.device
    work = torch.empty(0 if in_place else count, packing.values, dtype=torch.float32, device=groups.device)
    for part, values in zip(groups.split(count), computed.view(-1, packing.values).split(count), strict=True):
        dequantised = values if in_place else work[: len(part)]
        dequantise(part, packing, dequantised)
        if not in_place:
            values.copy_(dequantised, non_blocking=True)


def _multiply(stored: torch.Tensor, scale: torch.Tensor | None, computed: torch.Tensor) -> None:
    """Write `stored * scale` in chunks of rows, through one fp32 work tensor."""
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
