"""Packed values: neighbours that share a scale and a few bytes, and can only be told apart together (GGUF).

Sizes are those of ggml, whose files name a packing by a number. Values are packed along rows; a tensor is one run of
packs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One way to pack: `values` neighbours take `nbytes` bytes."""

    name: str
    values: int
    nbytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of that shape, which is a whole number of packs."""
        packs, left = divmod(math.prod(shape), self.values)
        assert not left, f"{list(shape)} is no whole number of {self.name} packs of {self.values}"
        return packs * self.nbytes


_32 = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
_256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}

PACKINGS = {
    name: Packing(name=name, values=values, nbytes=nbytes)
    for values, sizes in ((32, _32), (256, _256))
    for name, nbytes in sizes.items()
}
"""Every packing that can be unpacked, by its name."""


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype, packing: Packing | None) -> int:
    """Return the bytes that a tensor takes where it is stored."""
    return math.prod(shape) * dtype.itemsize if packing is None else packing.bytes_of(shape)
