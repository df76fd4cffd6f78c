"""Tiles cover the picture, and nothing beyond it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.wan.vae.tiles import Tiling, TilingError


@given(st.integers(8, 80), st.integers(1, 120), st.integers(1, 120))
def test_every_latent_pixel_lies_in_a_tile(eighths: int, height: int, width: int) -> None:
    tiling = Tiling.of(8 * eighths)
    tiles = tiling.tiles(height, width)
    assert {(y, x) for tile in tiles for y in tile.rows for x in tile.columns} == {
        (y, x) for y in range(height) for x in range(width)
    }
    assert all(len(tile.rows) <= eighths and len(tile.columns) <= eighths for tile in tiles)
    assert [(tile.row, tile.column) for tile in tiles] == sorted(
        {(tile.row, tile.column) for tile in tiles}
    )
    assert tiling.cuts(height, width) == (len(tiles) > 1)


@pytest.mark.parametrize(("pixels", "stride"), [(256, 192), (512, 384), (72, 56), (64, 48)])
def test_a_quarter_lies_over_the_next_tile(pixels: int, stride: int) -> None:
    assert Tiling.of(pixels).stride == stride


@pytest.mark.parametrize(
    ("pixels", "stride", "said"),
    [(60, 48, "60 pixels"), (64, 50, "50 pixels"), (64, 72, "up to that size"), (0, 8, "0")],
)
def test_tiles_that_make_no_picture_are_refused(pixels: int, stride: int, said: str) -> None:
    with pytest.raises(TilingError, match=said):
        Tiling(pixels=pixels, stride=stride)


def test_a_tile_of_a_few_pixels_is_refused() -> None:
    with pytest.raises(TilingError, match="give 64 or more"):
        Tiling.of(56)
