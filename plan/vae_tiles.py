"""How a picture is cut into tiles that are decoded one by one, and how their overlaps are blended.

The cut is diffusers' (`AutoencoderKLWan.tiled_decode`), so that a picture is the same wherever its tiles were decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import PIXELS_PER_LATENT

LEAST_LATENT = 8
"""No tile is smaller, in latent pixels: it would be seams."""
LEAST_PIXELS = LEAST_LATENT * PIXELS_PER_LATENT
OVERLAP = 4
"""One part in so many of a tile lies over the next one."""


class TilingError(ValueError):
    """Tiles that no picture can be made of; the message says which can."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile of a latent; rows and columns are counted in tiles, the ranges in latent pixels."""

    row: int
    column: int
    rows: range
    columns: range


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Square tiles of `pixels`, one every `stride` pixels of the decoded picture.

    Raises TilingError for sizes that are no multiples of a latent pixel's, or leave gaps.
    """

    pixels: int
    stride: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels of the picture for each latent pixel, along either side."""

    def __post_init__(self) -> None:
        for word, size in (("tiles", self.pixels), ("the stride", self.stride)):
            if size % self.per_latent or size < self.per_latent:
                raise TilingError(f"{word} of {size} pixels: give a multiple of {self.per_latent}")
        if self.stride > self.pixels:
            raise TilingError(f"tiles of {self.pixels} pixels, one every {self.stride}: give a stride up to that size")

    @classmethod
    def of(cls, pixels: int, per_latent: int = PIXELS_PER_LATENT) -> Tiling:
        """Tiles of that size that overlap by a quarter. Raises TilingError for less than 8 latent pixels."""
        if pixels < LEAST_LATENT * per_latent:
            raise TilingError(f"tiles of {pixels} pixels: give {LEAST_LATENT * per_latent} or more, 0 for none")
        overlap = pixels // OVERLAP // per_latent * per_latent
        return cls(pixels=pixels, stride=pixels - overlap, per_latent=per_latent)

    @property
    def patch(self) -> int:
        """Pixels along either side that the VAE makes as one; they are blended alike.

        Along a side it makes 8 of a latent pixel: pixels, or those of Wan2.2 5B patches of two.
        """
        return self.per_latent // PIXELS_PER_LATENT

    @property
    def blended(self) -> int:
        """Pixels of a tile's edge that are blended with the tile before it."""
        return self.pixels - self.stride

    def tiles(self, height: int, width: int) -> tuple[Tile, ...]:
        """The tiles of a latent of that size, row by row. One tile where it is no larger than a tile."""
        if not self.cuts(height, width):
            return (Tile(row=0, column=0, rows=range(height), columns=range(width)),)
        size, stride = self.pixels // self.per_latent, self.stride // self.per_latent
        return tuple(
            Tile(
                row=row,
                column=column,
                rows=range(top, min(top + size, height)),
                columns=range(left, min(left + size, width)),
            )
            for row, top in enumerate(range(0, height, stride))
            for column, left in enumerate(range(0, width, stride))
        )

    def cuts(self, height: int, width: int) -> bool:
        """Whether a latent of that size is more than one tile."""
        return max(height, width) > self.pixels // self.per_latent

    def computed(self, height: int, width: int) -> int:
        """Latent pixels of all tiles of a latent of that size together; overlaps count as often as they are decoded."""
        return sum(len(tile.rows) * len(tile.columns) for tile in self.tiles(height, width))
