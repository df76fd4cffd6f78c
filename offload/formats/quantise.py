"""Row quantisation to fp8 or int8 with one fp32 scale each.

Int8 with or without a rotation (ConvRot).
"""

from __future__ import annotations

import torch

from .rotation import kronecker_factors, rotated_sums, rotation_factor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max

# A smaller scale would be subnormal, or 0 for a row of zeros, and the quotients would be infinite
# or NaN.
SMALLEST_FP8_SCALE = torch.finfo(torch.float32).tiny

# Integers in the same width, and the mask that clears the sign bit. As integers, the remaining bits
# order values by magnitude, with infinity and NaN last. This takes a quarter of the time of `abs`
# and `amax` on floats.
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}
QUANTISABLE_DTYPES = tuple(_BITS)

# Values in the work tensor at once, 2 MB in fp32. Per core, 64 Ki take 20 % and 16 Ki 150 % more
# time because of the fixed cost per torch call. 4 Mi take 15 % more because they do not fit into
# the cache.
WORK_VALUES = 512 * 1024


class NotFiniteError(ValueError):
    """A row contains NaN or infinity. `row` counts from the first row of the argument."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row

    def __str__(self) -> str:
        return f"row {self.row} contains NaN or infinity"


def work_memory(columns: int) -> torch.Tensor:
    """Return a 1-D fp32 work tensor for quantising matrices with up to `columns` columns."""
    return torch.empty(max(WORK_VALUES, columns), dtype=torch.float32)


def quantise_rows(
    values: torch.Tensor, into: torch.Tensor, scales: torch.Tensor, work: torch.Tensor
) -> None:
    """Quantise exactly as `(values.float() / scales).to(FP8)`, with scales from `row_scales`.

    Args:
        values: [rows, columns], contiguous, in one of `QUANTISABLE_DTYPES`.
        into: `FP8` tensor in the same shape.
        scales: fp32 [rows, 1], overwritten. The model computes with `into.float() * scales`.
        work: tensor from `work_memory`, overwritten.

    Raises:
        NotFiniteError: a row contains NaN or infinity. The contents of `into` and `scales` are then
            undefined.
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
    """Write each row's largest magnitude / `LARGEST_FP8`, at least `SMALLEST_FP8_SCALE`.

    The arguments are as in `quantise_rows`.

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
    scales.div_(LARGEST_FP8)
    check_finite(scales)
    scales.clamp_(min=SMALLEST_FP8_SCALE)


def check_finite(scales: torch.Tensor) -> None:
    """Check the scales [rows, 1] of quantised rows.

    Raises:
        NotFiniteError: a row contains NaN or infinity, and so does its scale.
    """
    finite = torch.isfinite(scales)
    if not finite.all():
        raise NotFiniteError(int(finite.logical_not().nonzero()[0, 0]))


LARGEST_INT8 = 127
SMALLEST_INT8_SCALE = 1e-30
"""Scale for a row of zeros."""


def quantise_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes [rows, columns] and fp32 scales [rows, 1] for fp32 values.

    The values are overwritten.
    scale = max(|row|) / 127, at least `SMALLEST_INT8_SCALE`. code = value / scale, rounded to even.
    """
    scales = (values.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp_(min=SMALLEST_INT8_SCALE)
    codes = values.div_(scales).round_().clamp_(-LARGEST_INT8 - 1, LARGEST_INT8)
    return codes.to(torch.int8), scales


def quantise_rotated(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate fp32 values in column groups, and return codes and scales as `quantise_int8`.

    Raises:
        NotFiniteError: a row contains NaN or infinity.
    """
    rotated = rotated_sums(values, kronecker_factors(group, values.device)) * rotation_factor(group)
    codes, scales = quantise_int8(rotated)
    check_finite(scales)
    return codes, scales
