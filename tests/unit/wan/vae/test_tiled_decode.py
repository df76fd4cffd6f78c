"""Tiles decoded and blended in any order, against diffusers' tiled decode."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.schema import StateError
from wanstream.wan.vae.tiles import TileBlender, Tiling, crop, decoded_frames, gather_tile
from wanstream.wan.vae.vae import open_vae

TILING = Tiling(pixels=64, stride=48)


@pytest.fixture(scope="module")
def own_vae(tiny_pipeline: Callable[[], Path]) -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(tiny_pipeline() / "vae").eval()


def _latents(frames: int, height: int, width: int) -> torch.Tensor:
    # Large values reach beyond -1 to 1, where clamping before blending would show.
    return 3 * torch.randn(1, 16, frames, height, width, generator=torch.Generator().manual_seed(0))


def _tiled(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    vae.enable_tiling(
        tile_sample_min_height=TILING.pixels,
        tile_sample_min_width=TILING.pixels,
        tile_sample_stride_height=TILING.stride,
        tile_sample_stride_width=TILING.stride,
    )
    try:
        with torch.no_grad():
            return (vae.decode(latents).sample[0].movedim(0, -1) + 1) / 2
    finally:
        vae.disable_tiling()


@pytest.mark.slow  # decodes whole videos
@pytest.mark.parametrize(
    ("frames", "size"),
    [(3, (13, 9)), (3, (8, 8)), (1, (5, 20)), (1, (14, 14)), (3, (6, 4))],
    ids=str,
)
def test_tiles_in_any_order_are_bit_equal_to_diffusers(
    own_vae: AutoencoderKLWan, size: tuple[int, int], frames: int
) -> None:
    latents = _latents(frames, *size)
    expected = _tiled(own_vae, latents)
    tiles = list(TILING.tiles(*size))
    random.Random(1).shuffle(tiles)
    frames_out = torch.full((4 * (frames - 1) + 1, 8 * size[0], 8 * size[1], 3), torch.nan)
    blender = TileBlender(TILING, into=frames_out)
    for tile in tiles:
        blender.put(tile, _decode_tile(own_vae, crop(latents, tile)))
    assert torch.equal(frames_out, expected)
    assert own_vae.decode(latents).sample.shape[2] == len(expected), "the VAE itself still works"


def _decode_tile(
    vae: AutoencoderKLWan, tile: torch.Tensor, check: Callable[[], None] = lambda: None
) -> torch.Tensor:
    return gather_tile(decoded_frames(vae, tile), tile, check)


@pytest.mark.slow  # decodes whole videos
@pytest.mark.parametrize("tile", [0, 64])
def test_an_opened_vae_decodes_whole_or_in_tiles(
    tiny_pipeline: Callable[[], Path], own_vae: AutoencoderKLWan, tile: int
) -> None:
    latents = torch.cat([_latents(2, 13, 9), -_latents(2, 13, 9)])
    with open_vae(tiny_pipeline()) as vae:
        videos = vae.decode(latents, device="cpu", tiling=Tiling.of(tile) if tile else None)
    with torch.no_grad():
        for video, one in zip(videos, latents.split(1), strict=True):
            whole = (own_vae.decode(one).sample[0].movedim(0, -1) + 1) / 2
            assert torch.equal(video, _tiled(own_vae, one) if tile else whole)
            assert tile == 0 or not torch.equal(video, whole), (
                "tiles of an untrained VAE differ from full frames"
            )


def test_frames_come_one_latent_after_the_other(own_vae: AutoencoderKLWan) -> None:
    latents = _latents(3, 4, 4)
    parts = list(decoded_frames(own_vae, latents))
    assert [part.shape[1] for part in parts] == [1, 4, 4]
    with torch.no_grad():
        assert torch.equal(torch.cat(parts, 1).clamp(-1, 1), own_vae.decode(latents).sample[0])


def test_a_decode_that_is_stopped_ends_before_the_next_latent_frame(
    own_vae: AutoencoderKLWan,
) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        _decode_tile(own_vae, _latents(5, 4, 4), check)
    assert calls == [0, 1]


def test_repeated_tiles_are_reported(own_vae: AutoencoderKLWan) -> None:
    latents = _latents(1, 8, 20)
    first, *others = TILING.tiles(8, 20)
    blender = TileBlender(TILING, into=torch.empty(1, 64, 160, 3))
    blender.put(first, _decode_tile(own_vae, crop(latents, first)))
    blender.put(others[-1], _decode_tile(own_vae, crop(latents, others[-1])))
    for again in (first, others[-1]):
        with pytest.raises(StateError, match="was added before"):
            blender.put(again, _decode_tile(own_vae, crop(latents, again)))
