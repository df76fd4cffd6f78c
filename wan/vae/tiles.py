"""Tiles of a decode: their layout, the frames decoded from them, and blending where they overlap.

In shapes, P is the number of pixels for each latent pixel, along either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT, StateError
from ..latent_space import space_of

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


MIN_TILE_LATENT = 8
"""Smallest side of a tile, in latent pixels; a smaller tile would be mostly seams."""
OVERLAP = 4
"""Divisor of a tile's side that gives its overlap: a quarter."""


class TilingError(ValueError):
    """Invalid sizes of tiles; the message says which are valid."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile of a latent; rows and columns are counted in tiles, the ranges in latent pixels."""

    row: int
    column: int
    rows: range
    columns: range


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Square tiles of `pixels`, one every `stride` pixels of the decoded frame.

    Raises:
        TilingError: a size is not a multiple of a latent pixel, or tiles leave gaps.
    """

    pixels: int
    stride: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels for each latent pixel, along either side."""

    def __post_init__(self) -> None:
        for name, size in (("tiles", self.pixels), ("the stride", self.stride)):
            if size % self.per_latent or size < self.per_latent:
                raise TilingError(f"{name} of {size} pixels: give a multiple of {self.per_latent}")
        if self.stride > self.pixels:
            raise TilingError(f"tiles of {self.pixels} pixels, one every {self.stride}: give a stride up to that size")

    @classmethod
    def of(cls, pixels: int, per_latent: int = PIXELS_PER_LATENT) -> Tiling:
        """Return tiles of `pixels` that overlap by a quarter.

        Raises:
            TilingError: a tile is smaller than 8 latent pixels.
        """
        if pixels < MIN_TILE_LATENT * per_latent:
            raise TilingError(f"tiles of {pixels} pixels: give {MIN_TILE_LATENT * per_latent} or more, 0 for none")
        overlap = pixels // OVERLAP // per_latent * per_latent
        return cls(pixels=pixels, stride=pixels - overlap, per_latent=per_latent)

    @property
    def patch(self) -> int:
        """Side of the VAE's output patches in pixels; the pixels of a patch are blended with the same weight.

        Each VAE has 8 patches for a latent pixel, along either side: of 1 pixel, or in Wan2.2 5B of 2.
        """
        return self.per_latent // PIXELS_PER_LATENT

    @property
    def blended(self) -> int:
        """Pixels of a tile that are blended with the tile before it, along either side."""
        return self.pixels - self.stride

    def tiles(self, height: int, width: int) -> tuple[Tile, ...]:
        """Return the tiles of a latent of that size, row by row; one tile if it is not larger than a tile."""
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
        """Return whether a latent of that size has more than one tile."""
        return max(height, width) > self.pixels // self.per_latent

    def computed(self, height: int, width: int) -> int:
        """Return the latent pixels of all tiles together; overlaps count as often as they are decoded."""
        return sum(len(tile.rows) * len(tile.columns) for tile in self.tiles(height, width))


def decoded_frames(vae: AutoencoderKLWan, latents: torch.Tensor, *, whole: bool = False) -> Iterator[torch.Tensor]:
    """Decode raw latents [1, C, T, h, w]; yield frames [3, 1, Ph, Pw], then T - 1 times [3, 4, Ph, Pw].

    Frames are in the VAE's dtype on the device of `latents`, in about -1..1, not clamped. The decoder is causal, so a
    frame is final when it is yielded.

    Args:
        vae: with its weights on the device of `latents`.
        latents: raw, in the VAE's dtype.
        whole: True for frames that are bit-equal to `AutoencoderKLWan.decode` without tiles, False for those of its
            tiles: diffusers calls the first convolution once for all latent frames, but in tiles for each of them.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

    cache: list[object] = [None] * sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    for at, states in enumerate(_states(vae, latents, whole)):
        with torch.no_grad():
            frames = vae.decoder(states, feat_cache=cache, feat_idx=[0], first_chunk=at == 0)
        if vae.config.patch_size is not None:
            frames = unpatchify(frames, patch_size=vae.config.patch_size)
        yield frames[0]


def _states(vae: AutoencoderKLWan, latents: torch.Tensor, whole: bool) -> Iterator[torch.Tensor]:
    # A separate convolution call for each latent frame rounds differently from one call for all of them.
    for part in latents.split(latents.shape[2] if whole else 1, dim=2):
        with torch.no_grad():
            states = vae.post_quant_conv(part)
        yield from states.split(1, dim=2)


def gather_tile(
    parts: Iterable[torch.Tensor], latents: torch.Tensor, check: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Decode one tile of latents [1, C, T, h, w] to [3, 4(T - 1) + 1, Ph, Pw] fp32 on the CPU, not clamped.

    Args:
        parts: decoded on demand, see `decoded_frames`.
        latents: the tile, for its size.
        check: called before every latent frame; may raise to end the decode.
    """
    whole = torch.empty(3, *_decoded_size(latents))
    done = 0
    check()
    for part in parts:
        whole[:, done : done + part.shape[1]] = part
        done += part.shape[1]
        check()
    return whole


def crop(latents: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return the part of [1, C, T, h, w] that a tile covers, as a view."""
    rows, columns = tile.rows, tile.columns
    return latents[:, :, :, rows.start : rows.stop, columns.start : columns.stop]


def empty_frames(latents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate the frames of raw latents [B, C, T, h, w]: [B, 4(T - 1) + 1, Ph, Pw, 3] on the CPU."""
    return torch.empty(latents.shape[0], *_decoded_size(latents), 3, dtype=dtype)


def _decoded_size(latents: torch.Tensor) -> tuple[int, int, int]:
    """Return (frames, height, width) of the decoded video, in pixels."""
    _, channels, count, height, width = latents.shape
    pixels = space_of(channels).pixels
    return FRAMES_PER_LATENT * (count - 1) + 1, pixels * height, pixels * width


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
        # Edges of placed tiles that later tiles are blended with, by edge and first frame, fp32 [3, n, h, w]: RIGHT, or
        # the column of a lower edge. The edges of a tile replace the ones that it has read.
        self._edges: dict[tuple[int, int], torch.Tensor] = {}
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

        Tiles are added row by row, with all frames of one before the next, each in the same portions.

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
            _blend(self._edges[tile.column, frames.start], decoded, self._blended, self._tiling.patch, dim=2)
        if tile.column > 0:
            _blend(self._edges[RIGHT, frames.start], decoded, self._blended, self._tiling.patch, dim=3)
        if len(self._tiles) > 1:
            self._keep_edge(tile.column, frames.start, _last_lines(decoded, self._blended, dim=2))
            self._keep_edge(RIGHT, frames.start, _last_lines(decoded, self._blended, dim=3))
        top, left = (self._tiling.per_latent * start for start in (tile.rows.start, tile.columns.start))
        target = self._frames[frames, top:, left:]
        if len(self._tiles) > 1:
            target = target[:, : self._tiling.stride, : self._tiling.stride]
        pixels = as_pixels(decoded[:, :, : target.shape[1], : target.shape[2]])
        target.copy_(convert_pixels(pixels, target.dtype))
        self._placed_frames = frames.stop
        if self._placed_frames == len(self._frames):
            self._placed_tiles, self._placed_frames = self._placed_tiles + 1, 0

    def _keep_edge(self, edge: int, first_frame: int, lines: torch.Tensor) -> None:
        before = self._edges.get((edge, first_frame))
        # The edge before was read already: its memory is reused. A copy otherwise, because `lines` is a view.
        if before is not None and before.shape == lines.shape:
            before.copy_(lines)
        else:
            self._edges[edge, first_frame] = lines.clone()


def _last_lines(decoded: torch.Tensor, extent: int, *, dim: int) -> torch.Tensor:
    """Return the last `extent` lines, or all if there are fewer."""
    size = decoded.shape[dim]
    return decoded.narrow(dim, size - min(extent, size), min(extent, size))


def _blend(before: torch.Tensor, after: torch.Tensor, extent: int, patch: int, *, dim: int) -> None:
    """Fade from the last `extent` lines of `before` to the first of `after`, in place, in steps of `patch` lines."""
    assert before.shape[1] == after.shape[1], "every tile is added in the same portions of frames"
    steps = min(before.shape[dim], after.shape[dim], extent) // patch
    start = before.shape[dim] - steps * patch
    for at in range(steps):
        old = before.narrow(dim, start + at * patch, patch)
        new = after.narrow(dim, at * patch, patch)
        new.copy_(old * (1 - at / steps) + new * (at / steps))
