"""`TileBlender` RAM against the `DecodeNeeds` estimate."""

from __future__ import annotations

import pytest
import torch

from wanstream.wan.vae.memory import DecodeNeeds, TensorMemoryTracker
from wanstream.wan.vae.tiles import TileBlender, Tiling


@pytest.mark.slow  # decodes whole videos
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("height", "width", "latent_frames", "pixels"),
    [(30, 52, 5, 96), (20, 60, 3, 64), (48, 80, 2, 256)],
)
def test_frames_and_edges_take_the_estimated_memory(
    height: int, width: int, latent_frames: int, pixels: int, dtype: torch.dtype
) -> None:
    frames, tiling = 4 * (latent_frames - 1) + 1, Tiling.of(pixels)
    with TensorMemoryTracker() as tracker:
        blender = TileBlender(
            tiling, into=torch.empty(frames, 8 * height, 8 * width, 3, dtype=dtype)
        )
        for tile in tiling.tiles(height, width):
            for count in (1, *[4] * (latent_frames - 1)):
                blender.add_frames(
                    tile, torch.zeros(3, count, 8 * len(tile.rows), 8 * len(tile.columns))
                )
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
