"""Decoding of stored bytes to the compute dtype, on arrival of a block.

fp8 is converted to fp32 exactly; matrices are quantised to it with one scale per row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ...devices import runtime_for
from .gguf_dequant import QuantFormat, dequantise
from .layout import BlockFormat

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_BIAS = 2.0**8  # ratio of the exponent biases of e4m3fn and fp16
_SIGN_TWICE = 0x4000  # bit that holds a second copy of the sign after the arithmetic shift


def widen(stored: torch.Tensor, into: torch.Tensor, bits: torch.Tensor) -> None:
    """Write exactly `stored.float()`.

    Args:
        stored: one of `FP8_DTYPES`, on the CPU.
        into: fp32 tensor of the same shape.
        bits: int16 work tensor of the same shape; overwritten.
    """
    codes = stored.view(torch.int8)
    if stored.dtype == torch.float8_e5m2:
        torch.bitwise_left_shift(bits.copy_(codes), 8, out=bits)
        into.copy_(bits.view(torch.float16))
    elif _has_nan(codes):
        into.copy_(stored)
    else:
        torch.bitwise_left_shift(bits.copy_(codes), 7, out=bits)
        bits.bitwise_and_(~_SIGN_TWICE)
        into.copy_(bits.view(torch.float16)).mul_(_BIAS)


def _has_nan(codes: torch.Tensor) -> bool:
    """Return True if an e4m3fn value is NaN: 0x7F, the largest signed code, or 0xFF, the largest unsigned code."""
    return int(codes.amax()) == 0x7F or int(codes.view(torch.uint8).amax()) == 0xFF


QUANTISED_DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(QUANTISED_DTYPE).max

# A smaller scale would be subnormal, or 0 for a row of zeros, and the quotients would be infinite or NaN.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# Integers of the same width, and the mask that clears the sign bit. As integers, the remaining bits order values by
# magnitude, with infinity and NaN last. This takes a quarter of the time of `abs` and `amax` on floats.
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}
QUANTISABLE_DTYPES = tuple(_BITS)

# Values in the work tensor at once, 2 MB in fp32. Per core, 64 Ki take 20 % and 16 Ki 150 % more time because of the
# fixed cost of each torch call; 4 Mi take 15 % more because they do not fit into the cache.
WORK_VALUES = 512 * 1024


class NotFiniteError(ValueError):
    """A row contains NaN or infinity. `row` counts from the first row of the argument."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row

    def __str__(self) -> str:
        return f"row {self.row} contains NaN or infinity"


def work_memory(columns: int) -> torch.Tensor:
    """Return a 1-D fp32 work tensor for quantising matrices of up to `columns` columns."""
    return torch.empty(max(WORK_VALUES, columns), dtype=torch.float32)


def quantise_rows(values: torch.Tensor, into: torch.Tensor, scales: torch.Tensor, work: torch.Tensor) -> None:
    """Quantise exactly as `(values.float() / scales).to(QUANTISED_DTYPE)`, with the scales of `row_scales`.

    Args:
        values: [rows, columns], contiguous, of one of `QUANTISABLE_DTYPES`.
        into: tensor of the same shape in `QUANTISED_DTYPE`.
        scales: fp32 [rows, 1]; overwritten. The model computes with `into.float() * scales`.
        work: a tensor of `work_memory`; overwritten.

    Raises:
        NotFiniteError: a row contains NaN or infinity; the contents of `into` and `scales` are then undefined.
    """
    row_scales(values, scales, work)
    rows, columns = values.shape
    at_once = work.numel() // columns
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        quotient = work[: values[part].numel()].view(-1, columns)
        torch.div(values[part], scales[part], out=quotient)
        into[part].copy_(quotient)


def row_scales(values: torch.Tensor, scales: torch.Tensor, work: torch.Tensor) -> None:
    """Write the largest magnitude of each row / `LARGEST`, at least `SMALLEST_SCALE`; arguments as in `quantise_rows`.

    Raises:
        NotFiniteError: a row contains NaN or infinity.
    """
    rows, columns = values.shape
    integers, without_sign = _BITS[values.dtype]
    magnitudes = work.view(integers)
    at_once = magnitudes.numel() // columns
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        bits = values[part].view(integers)
        magnitude = magnitudes[: bits.numel()].view(-1, columns)
        torch.bitwise_and(bits, without_sign, out=magnitude)
        scales[part] = magnitude.amax(1, keepdim=True).view(values.dtype)
    scales.div_(LARGEST)
    finite = torch.isfinite(scales)
    if not finite.all():
        raise NotFiniteError(int(finite.logical_not().nonzero()[0, 0]))
    scales.clamp_(min=SMALLEST_SCALE)


# Scaled and quantised values are converted through fp32 in chunks of about this many values. That bounds the extra
# memory to 8 MB for a matrix of any size, plus the same for the integers of quantised ones. On a CPU it takes half the
# time of converting the matrix at once, and 64 Ki to 4 Mi values perform equally.
CHUNK_VALUES = 2 * 1024**2

# On a device, a piece of quantised values takes 4 to 20 kernel launches, so that pieces of `CHUNK_VALUES` would take
# thousands for a block. Larger ones take work memory: at most 0.5 % of the device's.
WORK_BYTES_PER_VALUE = 8
VRAM_PER_VALUE = 200 * WORK_BYTES_PER_VALUE


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
    for stored, computed in block_format.parts:
        values = into[computed.offset : computed.offset + computed.nbytes].view(computed.dtype).view(computed.shape)
        part = raw[stored.offset : stored.offset + stored.nbytes].view(stored.dtype).view(stored.view_shape)
        decode_tensor(part, values, packing=stored.packing, scale=scales.get(stored.name))


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
    elif scale is not None and stored.dtype in FP8_DTYPES and into.device.type != "cpu":
        # Two launches and no work tensor. The compute dtypes contain all fp8 values, and a factor with a dimension
        # makes the product fp32 before it is rounded.
        into.copy_(stored, non_blocking=True)
        factor = scale.to(into.device)
        into.mul_(factor if factor.dim() else factor.view((1,) * into.dim()))
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
    """Dequantise in pieces; on a CPU through one fp32 work tensor, unless `computed` is fp32 on a CPU too."""
    count = max(1, min(len(groups), values_at_once(groups.device) // packing.values))
    in_place = computed.device == groups.device and (computed.dtype == torch.float32 or groups.device.type != "cpu")
    work = torch.empty(0 if in_place else count, packing.values, dtype=torch.float32, device=groups.device)
    for part, values in zip(groups.split(count), computed.view(-1, packing.values).split(count), strict=True):
        dequantised = values if in_place else work[: len(part)]
        dequantise(part, packing, dequantised)
        if not in_place:
            values.copy_(dequantised, non_blocking=True)


def values_at_once(device: torch.device) -> int:
    """Return the number of quantised values that are decoded at once on `device`.

    Devices with much memory are fast ones, on which a launch costs more of a block's time: a card of 24 GB decodes 16
    Mi values at once, and one of 80 GB the largest matrix of Wan2.2 A14B.
    """
    return max(CHUNK_VALUES, _vram_bytes(device) // VRAM_PER_VALUE)


@functools.cache  # the driver takes long to return it
def _vram_bytes(device: torch.device) -> int:
    runtime = runtime_for(device)
    return 0 if runtime is None or not runtime.count() else runtime.memory().total


def decode_work_bytes(values: int, device: torch.device) -> int:
    """Return the bytes of device memory that decoding quantised tensors of up to `values` values takes."""
    return WORK_BYTES_PER_VALUE * min(values, values_at_once(device))


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
