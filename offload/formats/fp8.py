"""fp8 on a CPU: exact conversion to fp32, and quantisation of matrices with one scale per row."""

from __future__ import annotations

import torch

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
