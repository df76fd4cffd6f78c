"""Values of microscaled matrices: mxfp8 (OCP Microscaling Formats 1.0) and nvfp4 (NVIDIA)."""

from __future__ import annotations

import torch

from .packing import TILE_COLUMNS, TILE_ROWS, Microscaled

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats; the fourth bit is the sign."""

_FP32_MANTISSA_BITS = 23


def group_scales(scales: torch.Tensor, packing: Microscaled, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of each group of a matrix: fp32 [rows, groups].

    Args:
        scales: stored scales, 1-D uint8 in tiles.
        packing: MXFP8, with e8m0 scales, or NVFP4, with e4m3fn.
        shape: shape of the matrix.
    """
    rows, columns = packing.scale_shape(shape)
    # A tile holds scale (row, column) at (row % 32) * 16 + row // 32 * 4 + column.
    tiles = scales.view(rows // TILE_ROWS, columns // TILE_COLUMNS, 32, TILE_ROWS // 32, TILE_COLUMNS)
    codes = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[: shape[0], : shape[1] // packing.values]
    if packing.bits == 4:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    # The scale 2**-127, which only groups of zeros have, becomes 0.
    return codes.int().bitwise_left_shift_(_FP32_MANTISSA_BITS).view(torch.float32)


def pair_table(packing: Microscaled, dtype: torch.dtype) -> torch.Tensor:
    """Return both values of each byte of a 4-bit packing, [256, 2] on the CPU."""
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype)
    codes = torch.arange(256)
    high, low = values[codes >> 4], values[codes & 15]
    return torch.stack((high, low) if packing.high_first else (low, high), dim=1)
