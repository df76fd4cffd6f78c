"""Tiles cover the picture and nothing beyond it, and blending takes the estimated memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanstream.wan.vae.memory import DecodeNeeds, TensorMemoryTracker
from wanstream.wan.vae.tiles import TileBlender, Tiling, TilingError


@given(st.integers(8, 80), st.integers(1, 120), st.integers(1, 120))
def test_every_latent_pixel_lies_in_a_tile(eighths, height, width):
    tiling = Tiling.of(8 * eighths)
    tiles = tiling.tiles(height, width)
    covered = {(y, x) for tile in tiles for y in tile.rows for x in tile.columns}
    assert covered == {(y, x) for y in range(height) for x in range(width)}
    assert all(len(tile.rows) <= eighths and len(tile.columns) <= eighths for tile in tiles)
    places = [(tile.row, tile.column) for tile in tiles]
    assert places == sorted(set(places))
    assert tiling.cuts(height, width) == (len(tiles) > 1)


@pytest.mark.parametrize(("pixels", "stride"), [(256, 192), (512, 384), (72, 56), (64, 48)])
def test_quarter_lies_over_the_next_tile(pixels, stride):
    assert Tiling.of(pixels).stride == stride


@pytest.mark.parametrize(
    ("pixels", "stride", "said"),
    [(60, 48, "60 pixels"), (64, 50, "50 pixels"), (64, 72, "up to that size"), (0, 8, "0")],
)
def test_other_sizes_are_refused(pixels, stride, said):
    with pytest.raises(TilingError, match=said):
        Tiling(pixels=pixels, stride=stride)
    with pytest.raises(TilingError, match="give 64 or more"):
        Tiling.of(56)


@pytest.mark.slow  # whole videos
@pytest.mark.parametrize(
    ("height", "width", "latent_frames", "pixels", "dtype"),
    [(30, 52, 5, 96, torch.float32), (20, 60, 3, 64, torch.uint8), (48, 80, 2, 256, torch.uint8)],
)
def test_frames_and_edges_take_the_estimated_memory(height, width, latent_frames, pixels, dtype):
    frames = 4 * (latent_frames - 1) + 1
    tiling = Tiling.of(pixels)
    with TensorMemoryTracker() as tracker:
        into = torch.empty(frames, 8 * height, 8 * width, 3, dtype=dtype)
        blender = TileBlender(tiling, into=into)
        for tile in tiling.tiles(height, width):
            size = (8 * len(tile.rows), 8 * len(tile.columns))
            for count in (1, *[4] * (latent_frames - 1)):
                blender.add_frames(tile, torch.zeros(3, count, *size))
    needs = DecodeNeeds(
        height=height,
        width=width,
        frames=frames,
        pixel_bytes=1,
        value_bytes=dtype.itemsize,
        keeps_frames=dtype == torch.float32,
    )
    estimate = needs.host_bytes(tiling)
    assert 0.85 * estimate <= tracker.peak <= 1.02 * estimate, f"{tracker.peak / estimate:.3f}"
