"""Decoding with smaller tiles after an out-of-memory error.

A failed attempt leaves no tensors behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.wan.vae.memory import DecodeNeeds, VaeMemoryError
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, open_vae, retry_with_smaller_tiles

NEEDS = DecodeNeeds(
    height=13, width=20, frames=5, pixel_bytes=1000, value_bytes=4, keeps_frames=True
)


class Tries:
    """Decode that raises `error` for tiles above a size."""

    def __init__(
        self, fits: int, error: Callable[[], RuntimeError] = torch.OutOfMemoryError
    ) -> None:
        self._fits, self._error = fits, error
        self.sizes: list[int] = []
        self.left: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, tiling: Tiling | None) -> str:
        assert all(tensor() is None for tensor in self.left), (
            "tensors of a failed attempt are freed before the next one"
        )
        self.sizes.append(0 if tiling is None else tiling.pixels)
        made = torch.zeros(10)
        self.left.append(weakref.ref(made))
        if tiling is None or tiling.pixels > self._fits:
            raise self._error()
        return f"decoded in {tiling.pixels}"


def test_tiles_get_smaller_until_they_fit() -> None:
    tries, changes = Tries(fits=80), []
    assert retry_with_smaller_tiles(tries, NEEDS, None, changes.append) == "decoded in 64"
    assert tries.sizes == [0, 88, 64]
    assert changes == [
        "no memory for decoding whole frames: retrying with tiles of 88 pixels",
        "no memory for decoding tiles of 88 pixels: retrying with tiles of 64 pixels",
    ]


def test_what_fits_is_tried_once() -> None:
    tries = Tries(fits=128)
    assert retry_with_smaller_tiles(tries, NEEDS, Tiling.of(128)) == "decoded in 128"
    assert tries.sizes == [128]


def test_the_smallest_tile_is_the_last_try() -> None:
    tries = Tries(fits=0)
    with pytest.raises(
        DecodeOutOfMemoryError, match="tiles of 64 pixels, the smallest size: OutOfMemoryError"
    ) as none:
        retry_with_smaller_tiles(tries, NEEDS, Tiling.of(72))
    assert tries.sizes == [72, 64]
    assert isinstance(none.value, VaeMemoryError)
    assert isinstance(none.value, torch.OutOfMemoryError)


def test_ram_that_cannot_be_had_is_a_shortage_too() -> None:
    said = (
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8"
    )
    assert (
        retry_with_smaller_tiles(
            Tries(fits=64, error=lambda: RuntimeError(said)), NEEDS, Tiling.of(72)
        )
        == "decoded in 64"
    )


def test_another_error_ends_it_at_once() -> None:
    tries = Tries(fits=64, error=lambda: RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        retry_with_smaller_tiles(tries, NEEDS, None)
    assert tries.sizes == [0]


@pytest.mark.slow  # decodes whole videos
def test_the_video_is_that_of_the_tiles_that_fitted(tiny_pipeline: Callable[[], Path]) -> None:
    latents = torch.randn(1, 16, 2, 9, 12, generator=torch.Generator().manual_seed(0))
    with open_vae(tiny_pipeline()) as vae:

        def decode(tiling: Tiling | None) -> torch.Tensor:
            def short() -> None:
                calls.append(0)
                if tiling is None and len(calls) == 2:
                    raise torch.OutOfMemoryError("after the first frame")

            calls: list[int] = []
            return vae.decode(latents, device="cpu", tiling=tiling, check=short)

        made = retry_with_smaller_tiles(decode, vae.decode_needs(latents), None)
        assert torch.equal(made, vae.decode(latents, device="cpu", tiling=Tiling.of(64)))
