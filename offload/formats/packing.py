"""Packings: stored matrix forms with more than one number per value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """GGUF quantisation format: a group with `values` neighbouring values takes `nbytes` bytes."""

    name: str
    values: int
    nbytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the stored bytes for a tensor with this shape, a whole number of groups."""
        groups, rest = divmod(math.prod(shape), self.values)
        assert not rest, (
            f"{list(shape)} is not a whole number of {self.name} groups of {self.values} values"
        )
        return groups * self.nbytes

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(shape) // self.values, self.nbytes)


# Bytes per group of 32 or 256 values, as in ggml.
_32 = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
_256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}

QUANT_FORMATS = {
    name: QuantFormat(name=name, values=values, nbytes=nbytes)
    for values, sizes in ((32, _32), (256, _256))
    for name, nbytes in sizes.items()
}
"""All GGUF formats with dequantisation, by name."""

UNIT = 16
"""Neighbouring values with one scale in every packing."""

TILE_ROWS = 128
TILE_COLUMNS = 4
"""Tile size for the scales of `Microscaled`, as cuBLAS reads them."""


@dataclass(frozen=True, kw_only=True)
class Microscaled:
    """Matrix of 8- or 4-bit floats, with one scale byte for `values` neighbouring values in a row.

    The codes come first, row by row. The scales follow in tiles with `TILE_ROWS` rows and
    `TILE_COLUMNS` scales, padded to whole tiles.
    """

    name: str
    values: int
    bits: int
    high_first: bool = True
    """The first of two values in a byte is in the high bits."""

    def code_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.bits // 8

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return scale rows and columns, with padding."""
        rows = -(-shape[0] // TILE_ROWS)
        columns = -(-shape[1] // self.values // TILE_COLUMNS)
        return rows * TILE_ROWS, columns * TILE_COLUMNS

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return a matrix's stored bytes. Columns must be a multiple of `values`."""
        assert shape[-1] % self.values == 0, (
            f"{list(shape)} is not a whole number of {self.name} groups per row"
        )
        return self.code_bytes(shape) + math.prod(self.scale_shape(shape))

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.bytes_of(shape),)


MXFP8 = Microscaled(name="mxfp8", values=32, bits=8)
NVFP4 = Microscaled(name="nvfp4", values=16, bits=4)


@dataclass(frozen=True, kw_only=True)
class EightBit:
    """Matrix of one-byte codes, row by row, followed by the scales: value = code x scale.

    If `group` is not 0, the codes are for the rotated matrix: each group of `group` columns was
    multiplied by the `rotation` matrix (ConvRot).
    """

    dtype: torch.dtype = torch.int8
    """int8 or an fp8 dtype."""
    group: int = 0
    by_row: bool = True
    """There is one scale for each row, not one for the matrix."""
    block: int = 0
    """Columns per scale in a row. 0 for all."""
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        if self.block:
            return f"{'int8' if self.dtype == torch.int8 else 'fp8'} in blocks of {self.block}"
        if self.dtype != torch.int8:
            return "fp8"
        return f"int8 ConvRot {self.group}" if self.group else "int8"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return scale rows and columns."""
        return shape[0] if self.by_row else 1, shape[1] // self.block if self.block else 1

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return a matrix's stored bytes.

        The codes must fill whole scales, groups and blocks.
        """
        assert math.prod(shape) % self.scale_dtype.itemsize == 0, (
            f"{list(shape)} codes do not end at a scale"
        )
        for columns in (self.group, self.block):
            assert not columns or shape[-1] % columns == 0, (
                f"{list(shape)} is not a whole number of {self.name}"
            )
        return math.prod(shape) + math.prod(self.scale_shape(shape)) * self.scale_dtype.itemsize

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.bytes_of(shape),)

    def split(
        self, stored: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a stored matrix: codes in `shape`, and scales in `scale_shape`."""
        count = math.prod(shape)
        codes = stored[:count].view(self.dtype).view(shape)
        scales = stored[count : self.bytes_of(shape)].view(self.scale_dtype)
        return codes, scales.view(self.scale_shape(shape))


Packing: TypeAlias = QuantFormat | Microscaled | EightBit

Constants: TypeAlias = dict[tuple[Packing, torch.dtype], tuple[torch.Tensor, ...]]
"""Tables and matrices on a device by packing and dtype. A caller that keeps them saves copies per
block."""


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype, packing: Packing | None) -> int:
    """Return the stored bytes for a tensor in `shape`."""
    if packing is None:
        return math.prod(shape) * dtype.itemsize
    return packing.bytes_of(shape)
