"""How a picture is cut into tiles that are decoded one by one, and how their overlaps are blended.

The cut is diffusers' (`AutoencoderKLWan.tiled_decode`), so that a picture is the same wherever its tiles were decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import PIXELS_PER_LATENT

LEAST_PIXELS = 8 * PIXELS_PER_LATENT
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

    Raises TilingError for sizes that are no multiples of 8, or leave gaps.
    """

    pixels: int
    stride: int

    def __post_init__(self) -> None:
        for word, size in (("tiles", self.pixels), ("the stride", self.stride)):
            if size % PIXELS_PER_LATENT or size < PIXELS_PER_LATENT:
                raise TilingError(f"{word} of {size} pixels: give a multiple of {PIXELS_PER_LATENT}")
        if self.stride > self.pixels:
            raise TilingError(f"tiles of {self.pixels} pixels, one every {self.stride}: give a stride up to that size")

    @classmethod
    def of(cls, pixels: int) -> Tiling:
        """Tiles of that size that overlap by a quarter. Raises TilingError for less than 64 pixels."""
        if pixels < LEAST_PIXELS:
            raise TilingError(f"tiles of {pixels} pixels: give {LEAST_PIXELS} or more, 0 for none")
        overlap = pixels // OVERLAP // PIXELS_PER_LATENT * PIXELS_PER_LATENT
        return cls(pixels=pixels, stride=pixels - overlap)

    @property
    def blended(self) -> int:
        """Pixels of a tile's edge that are blended with the tile before it."""
        return self.pixels - self.stride

    def tiles(self, height: int, width: int) -> tuple[Tile, ...]:
        """The tiles of a latent of that size, row by row. One tile where it is no larger than a tile."""
        if not self.cuts(height, width):
            return (Tile(row=0, column=0, rows=range(height), columns=range(width)),)
        size, stride = self.pixels // PIXELS_PER_LATENT, self.stride // PIXELS_PER_LATENT
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
        return max(height, width) > self.pixels // PIXELS_PER_LATENT
