"""Tiles of a decoded video become frames again, blended where they overlap, in the order that diffusers blends them."""

from __future__ import annotations

import torch

from ...schema import StateError
from .tiles import Tile, Tiling

RIGHT = -1
"""Stands for the right edge of the last tile, where lower edges go by their column."""


def as_pixels(decoded: torch.Tensor) -> torch.Tensor:
    """What the decoder makes, [3, F, H, W] around -1 to 1 -> [F, H, W, 3] in 0..1. Written into `decoded`."""
    return decoded.movedim(0, -1).clamp_(-1, 1).add_(1).div_(2)


def stored_as(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pixels in 0..1 as images, fp32, or as a video file stores them, uint8; written into `pixels`."""
    return pixels.mul_(255).round_().to(dtype) if dtype == torch.uint8 else pixels.to(dtype)


class TileBlender:
    """Tiles in any order -> frames, written into `into`, [F, H, W, 3] on the CPU: fp32 in 0..1, or uint8 in 0..255.

    Beside the frames it holds the edges of tiles whose neighbours are still to come, and what came too early.
    """

    def __init__(self, tiling: Tiling, *, into: torch.Tensor) -> None:
        height, width = (size // tiling.per_latent for size in into.shape[1:3])
        self._tiling, self._frames = tiling, into
        self._tiles = tiling.tiles(height, width)
        self._blended = tiling.blended if tiling.cuts(height, width) else 0
        self._early: dict[tuple[int, int], torch.Tensor] = {}
        self._edges = _Edges()
        self._placed = 0
        self._done = 0

    @property
    def frames(self) -> torch.Tensor:
        """All frames. Raises MosaicError while tiles are missing."""
        if self._placed < len(self._tiles):
            raise StateError(f"{len(self._tiles) - self._placed} of {len(self._tiles)} tiles are missing")
        return self._frames

    def put(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Take a tile as `decode_tile` gives it; its memory is written to. Raises MosaicError for one that was put."""
        number = self._tiles.index(tile)
        if number < self._placed or (number == self._placed and self._done) or (tile.row, tile.column) in self._early:
            raise StateError(f"the tile in row {tile.row}, column {tile.column} was put before")
        self._early[tile.row, tile.column] = decoded
        while self._placed < len(self._tiles):
            due = self._tiles[self._placed]
            waiting = self._early.pop((due.row, due.column), None)
            if waiting is None:
                return
            self._place(due, waiting)

    def put_frames(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Take the next frames of a tile, [3, n, h, w] on the CPU; their memory is written to.

        Raises MosaicError unless it is this tile's turn: row by row, and all frames of one before the next.
        """
        if self._placed == len(self._tiles) or self._tiles[self._placed] != tile:
            raise StateError(f"it is not the turn of the tile in row {tile.row}, column {tile.column}")
        if self._done + decoded.shape[1] > len(self._frames):
            raise StateError(f"{self._done + decoded.shape[1]} frames of a tile, {len(self._frames)} of the video")
        self._place(tile, decoded)

    def _place(self, tile: Tile, decoded: torch.Tensor) -> None:
        frames = slice(self._done, self._done + decoded.shape[1])
        if tile.row > 0:
            _blend(self._edges.read(tile.column, frames), decoded, self._blended, self._tiling.patch, dim=2)
        if tile.column > 0:
            _blend(self._edges.read(RIGHT, frames), decoded, self._blended, self._tiling.patch, dim=3)
        if len(self._tiles) > 1:
            self._edges.keep(tile.column, _last(decoded, self._blended, dim=2), frames, of=len(self._frames))
            self._edges.keep(RIGHT, _last(decoded, self._blended, dim=3), frames, of=len(self._frames))
        top, left = (self._tiling.per_latent * start for start in (tile.rows.start, tile.columns.start))
        place = self._frames[frames, top:, left:]
        if len(self._tiles) > 1:
            place = place[:, : self._tiling.stride, : self._tiling.stride]
        shown = as_pixels(decoded[:, :, : place.shape[1], : place.shape[2]])
        place.copy_(stored_as(shown, place.dtype))
        self._done = frames.stop
        if self._done == len(self._frames):
            self._placed, self._done = self._placed + 1, 0


class _Edges:
    """Edges of placed tiles that others will be blended with, all frames of each, fp32 [3, F, h, w].

    Tiles are placed one after the other, so a tile's edges take the place of those that it has read itself.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._coming: dict[int, torch.Tensor] = {}

    def read(self, edge: int, frames: slice) -> torch.Tensor:
        """Frames of the edge that was kept last; RIGHT, or the number of a column for a lower edge in it."""
        return self._kept[edge][:, frames]

    def keep(self, edge: int, lines: torch.Tensor, frames: slice, *, of: int) -> None:
        """Keep some frames of the `of` that an edge has; with the last of them it is there to be read."""
        if frames.start == 0:
            shape, before = (lines.shape[0], of, *lines.shape[2:]), self._kept.get(edge)
            # What was read of these frames is not needed any more, and the next frames lie beside them.
            self._coming[edge] = before if before is not None and before.shape == shape else torch.empty(shape)
        self._coming[edge][:, frames] = lines
        if frames.stop == of:
            self._kept[edge] = self._coming.pop(edge)


def _last(decoded: torch.Tensor, extent: int, *, dim: int) -> torch.Tensor:
    """The last `extent` lines, or as many as there are."""
    size = decoded.shape[dim]
    return decoded.narrow(dim, size - min(extent, size), min(extent, size))


def _blend(before: torch.Tensor, after: torch.Tensor, extent: int, patch: int, *, dim: int) -> None:
    """Fade from the last `extent` lines of `before` to the first of `after`, by `patch` lines, written into `after`."""
    steps = min(before.shape[dim], after.shape[dim], extent) // patch
    start = before.shape[dim] - steps * patch
    for at in range(steps):
        old = before.narrow(dim, start + at * patch, patch)
        new = after.narrow(dim, at * patch, patch)
        new.copy_(old * (1 - at / steps) + new * (at / steps))
