"""Decoding with smaller tiles after an out-of-memory error.

A failed attempt leaves no tensors behind.
"""

from __future__ import annotations

import weakref

import pytest
import torch

from wanstream.wan.vae.memory import DecodeNeeds, VaeMemoryError
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, retry_with_smaller_tiles

NEEDS = DecodeNeeds(
    height=13, width=20, frames=5, pixel_bytes=1000, value_bytes=4, keeps_frames=True
)
NO_RAM = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"


class Tries:
    """Decode that raises `error` for tiles above a size."""

    def __init__(self, fits: int, error: Exception | None = None) -> None:
        self._fits, self._error = fits, error
        self.sizes: list[int] = []
        self.left: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, tiling: Tiling | None) -> str:
        # Tensors of a failed attempt are freed before the next one.
        assert all(tensor() is None for tensor in self.left)
        self.sizes.append(0 if tiling is None else tiling.pixels)
        made = torch.zeros(10)
        self.left.append(weakref.ref(made))
        if tiling is None or tiling.pixels > self._fits:
            raise self._error or torch.OutOfMemoryError
        return f"decoded in {tiling.pixels}"


def test_tiles_get_smaller_until_they_fit():
    tries, changes = Tries(fits=80), []
    assert retry_with_smaller_tiles(tries, NEEDS, None, changes.append) == "decoded in 64"
    assert tries.sizes == [0, 88, 64]
    assert changes == [
        "no memory for decoding whole frames: retrying with tiles of 88 pixels",
        "no memory for decoding tiles of 88 pixels: retrying with tiles of 64 pixels",
    ]


@pytest.mark.parametrize(
    ("tries", "sizes"), [(Tries(128), [128]), (Tries(64, RuntimeError(NO_RAM)), [128, 80, 64])]
)
def test_ram_that_cannot_be_had_is_a_shortage_too(tries, sizes):
    found = retry_with_smaller_tiles(tries, NEEDS, Tiling.of(128))
    assert found == f"decoded in {sizes[-1]}"
    assert tries.sizes == sizes


def test_smallest_tile_is_the_last_try():
    tries = Tries(fits=0)
    said = "tiles of 64 pixels, the smallest size: OutOfMemoryError"
    with pytest.raises(DecodeOutOfMemoryError, match=said) as none:
        retry_with_smaller_tiles(tries, NEEDS, Tiling.of(72))
    assert tries.sizes == [72, 64]
    assert isinstance(none.value, VaeMemoryError)
    assert isinstance(none.value, torch.OutOfMemoryError)


def test_another_error_ends_it_at_once():
    tries = Tries(64, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        retry_with_smaller_tiles(tries, NEEDS, None)
    assert tries.sizes == [0]
