"""Blending of decoded tiles to frames, in the order of diffusers' tiled decode."""

from __future__ import annotations

import torch

from ...schema import StateError
from .tiles import Tile, Tiling

RIGHT = -1
"""Key of the right edge of the last tile; lower edges have their column as key."""


def as_pixels(decoded: torch.Tensor) -> torch.Tensor:
    """Convert the decoder's output [3, F, H, W] in about -1..1 to [F, H, W, 3] in 0..1, in place."""
    return decoded.movedim(0, -1).clamp_(-1, 1).add_(1).div_(2)


def convert_pixels(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert pixels in 0..1 to `dtype`: fp32 for images, uint8 for video files; overwrites `pixels`."""
    return pixels.mul_(255).round_().to(dtype) if dtype == torch.uint8 else pixels.to(dtype)


class TileBlender:
    """Blends tiles, added in any order, into the frames `into`.

    `into` is [F, H, W, 3] on the CPU: fp32 in 0..1, or uint8 in 0..255. In addition to it, RAM holds the edges of tiles
    whose neighbours are not decoded yet, and tiles that were added before their turn.
    """

    def __init__(self, tiling: Tiling, *, into: torch.Tensor) -> None:
        height, width = (size // tiling.per_latent for size in into.shape[1:3])
        self._tiling, self._frames = tiling, into
        self._tiles = tiling.tiles(height, width)
        self._blended = tiling.blended if tiling.cuts(height, width) else 0
        self._pending: dict[tuple[int, int], torch.Tensor] = {}
        self._edges = _Edges()
        self._placed_tiles = 0
        self._placed_frames = 0  # of the next tile

    @property
    def frames(self) -> torch.Tensor:
        """All frames.

        Raises:
            StateError: tiles are missing.
        """
        if self._placed_tiles < len(self._tiles):
            raise StateError(f"{len(self._tiles) - self._placed_tiles} of {len(self._tiles)} tiles are missing")
        return self._frames

    def put(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Add a tile as returned by `decode_tile`; its memory is overwritten.

        Raises:
            StateError: the tile was added before.
        """
        index, key = self._tiles.index(tile), (tile.row, tile.column)
        begun = index == self._placed_tiles and self._placed_frames > 0
        if index < self._placed_tiles or begun or key in self._pending:
            raise StateError(f"the tile in row {tile.row}, column {tile.column} was added before")
        self._pending[key] = decoded
        # Blend in one fixed order, not in the order of arrival: the last bits depend on it.
        while self._placed_tiles < len(self._tiles):
            due = self._tiles[self._placed_tiles]
            pending = self._pending.pop((due.row, due.column), None)
            if pending is None:
                return
            self._place(due, pending)

    def add_frames(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Add the next frames of a tile, [3, n, h, w] on the CPU; their memory is overwritten.

        Tiles are added row by row, with all frames of one before the next.

        Raises:
            StateError: another tile is next, or the tile has more frames than the video.
        """
        if self._placed_tiles == len(self._tiles) or self._tiles[self._placed_tiles] != tile:
            raise StateError(f"the tile in row {tile.row}, column {tile.column} is not the next one")
        frames = self._placed_frames + decoded.shape[1]
        if frames > len(self._frames):
            raise StateError(f"the tile has {frames} frames or more, the video {len(self._frames)}")
        self._place(tile, decoded)

    def _place(self, tile: Tile, decoded: torch.Tensor) -> None:
        frames = slice(self._placed_frames, self._placed_frames + decoded.shape[1])
        # First with the tile above, then with the tile to the left, and edges are stored after blending: this is
        # diffusers' order, which the last bits depend on.
        if tile.row > 0:
            _blend(self._edges.read(tile.column, frames), decoded, self._blended, self._tiling.patch, dim=2)
        if tile.column > 0:
            _blend(self._edges.read(RIGHT, frames), decoded, self._blended, self._tiling.patch, dim=3)
        if len(self._tiles) > 1:
            self._edges.store(tile.column, _last_lines(decoded, self._blended, dim=2), frames, total=len(self._frames))
            self._edges.store(RIGHT, _last_lines(decoded, self._blended, dim=3), frames, total=len(self._frames))
        top, left = (self._tiling.per_latent * start for start in (tile.rows.start, tile.columns.start))
        target = self._frames[frames, top:, left:]
        if len(self._tiles) > 1:
            target = target[:, : self._tiling.stride, : self._tiling.stride]
        pixels = as_pixels(decoded[:, :, : target.shape[1], : target.shape[2]])
        target.copy_(convert_pixels(pixels, target.dtype))
        self._placed_frames = frames.stop
        if self._placed_frames == len(self._frames):
            self._placed_tiles, self._placed_frames = self._placed_tiles + 1, 0


class _Edges:
    """Edges of placed tiles that later tiles are blended with: all frames of each, fp32 [3, F, h, w].

    Tiles are placed one after the other, so a tile's edges may overwrite the ones that it has read.
    """

    def __init__(self) -> None:
        self._complete: dict[int, torch.Tensor] = {}
        self._partial: dict[int, torch.Tensor] = {}

    def read(self, edge: int, frames: slice) -> torch.Tensor:
        """Return frames of an edge that was stored completely; the key is RIGHT, or the column of a lower edge."""
        return self._complete[edge][:, frames]

    def store(self, edge: int, lines: torch.Tensor, frames: slice, *, total: int) -> None:
        """Store some of the `total` frames of an edge; it can be read after the last of them."""
        if frames.start == 0:
            shape, before = (lines.shape[0], total, *lines.shape[2:]), self._complete.get(edge)
            # Reuse the memory of the edge before: its frames up to here were read already, and the later ones, which
            # the current tile reads next, are other rows of the tensor.
            self._partial[edge] = before if before is not None and before.shape == shape else torch.empty(shape)
        self._partial[edge][:, frames] = lines
        if frames.stop == total:
            self._complete[edge] = self._partial.pop(edge)


def _last_lines(decoded: torch.Tensor, extent: int, *, dim: int) -> torch.Tensor:
    """Return the last `extent` lines, or all if there are fewer."""
    size = decoded.shape[dim]
    return decoded.narrow(dim, size - min(extent, size), min(extent, size))


def _blend(before: torch.Tensor, after: torch.Tensor, extent: int, patch: int, *, dim: int) -> None:
    """Fade from the last `extent` lines of `before` to the first of `after`, in place, in steps of `patch` lines."""
    steps = min(before.shape[dim], after.shape[dim], extent) // patch
    start = before.shape[dim] - steps * patch
    for at in range(steps):
        old = before.narrow(dim, start + at * patch, patch)
        new = after.narrow(dim, at * patch, patch)
        new.copy_(old * (1 - at / steps) + new * (at / steps))
