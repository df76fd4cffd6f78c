"""Decode tiles: layout, decoded frames, and blending where tiles overlap.

In shapes, P is the number of pixels per latent pixel, along either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schema import StateError
from ...shapes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ..latents.space import space_of

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


MIN_TILE_LATENT = 8
"""Smallest tile side, in latent pixels. A smaller tile would be mostly seams."""
OVERLAP = 4
"""Divisor from a tile's side to its overlap: a quarter."""


class TilingError(ValueError):
    """Invalid tile sizes. The message has valid ones."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One latent tile. Rows and columns are counted in tiles, ranges in latent pixels."""

    row: int
    column: int
    rows: range
    columns: range


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Square tiles with `pixels` per side, one every `stride` pixels in the decoded frame.

    Raises:
        TilingError: a size is not a multiple of a latent pixel, or tiles leave gaps.
    """

    pixels: int
    stride: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels per latent pixel, along either side."""

    def __post_init__(self) -> None:
        for name, size in (("tiles", self.pixels), ("the stride", self.stride)):
            if size % self.per_latent or size < self.per_latent:
                raise TilingError(f"{name} of {size} pixels: give a multiple of {self.per_latent}")
        if self.stride > self.pixels:
            raise TilingError(
                f"tiles of {self.pixels} pixels, one every {self.stride}: give a stride up to that "
                "size"
            )

    @classmethod
    def of(cls, pixels: int, per_latent: int = PIXELS_PER_LATENT) -> Tiling:
        """Return tiles with `pixels` per side that overlap by a quarter.

        Raises:
            TilingError: a tile is smaller than 8 latent pixels.
        """
        if pixels < MIN_TILE_LATENT * per_latent:
            raise TilingError(
                f"tiles of {pixels} pixels: give {MIN_TILE_LATENT * per_latent} or more, 0 for none"
            )
        overlap = pixels // OVERLAP // per_latent * per_latent
        return cls(pixels=pixels, stride=pixels - overlap, per_latent=per_latent)

    @property
    def patch(self) -> int:
        """Side of the VAE's output patches in pixels.

        All pixels in a patch are blended with the same weight.

        Each VAE has 8 patches per latent pixel, along either side: patches of 1 pixel, or 2 in
        Wan2.2 5B.
        """
        return self.per_latent // PIXELS_PER_LATENT

    @property
    def blended(self) -> int:
        """Pixels blended with the previous tile, along either side."""
        return self.pixels - self.stride

    def tiles(self, height: int, width: int) -> tuple[Tile, ...]:
        """Return the tiles for a latent with this size, row by row.

        One tile if the latent is not larger than a tile.
        """
        if not self.cuts(height, width):
            return (Tile(row=0, column=0, rows=range(height), columns=range(width)),)
        size = self.pixels // self.per_latent
        stride = self.stride // self.per_latent
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
        """Return True if a latent with this size has more than one tile."""
        return max(height, width) > self.pixels // self.per_latent

    def computed(self, height: int, width: int) -> int:
        """Return the number of latent pixels in all tiles.

        Overlaps count as often as they are decoded.
        """
        return sum(len(tile.rows) * len(tile.columns) for tile in self.tiles(height, width))


def decoded_frames(
    vae: AutoencoderKLWan, latents: torch.Tensor, *, whole: bool = False
) -> Iterator[torch.Tensor]:
    """Decode raw latents [1, C, T, h, w].

    Yield frames [3, 1, Ph, Pw], then T - 1 times [3, 4, Ph, Pw].

    Frames are in the VAE's dtype on the device of `latents`, in about -1..1, not clamped. The
    decoder is causal, so a frame is final when it is yielded.

    Args:
        vae: VAE with weights on the device of `latents`.
        latents: raw latents in the VAE's dtype.
        whole: True for frames bit-equal to `AutoencoderKLWan.decode` without tiles, False for
            frames bit-equal to its tiles. diffusers calls the first convolution once for all latent
            frames, but in tiles once for each.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

    # One slot for each causal convolution, in call order, as diffusers counts them.
    cache: list[object] = [None] * sum(
        isinstance(module, WanCausalConv3d) for module in vae.decoder.modules()
    )
    for at, states in enumerate(_states(vae, latents, whole)):
        # Not around the loop: the caller would be in `no_grad` between frames too.
        with torch.no_grad():
            # The decoder counts convolutions in `feat_idx`, so every latent frame needs a new list.
            frames = vae.decoder(states, feat_cache=cache, feat_idx=[0], first_chunk=at == 0)
        if vae.config.patch_size is not None:
            frames = unpatchify(frames, patch_size=vae.config.patch_size)
        yield frames[0]


def _states(vae: AutoencoderKLWan, latents: torch.Tensor, whole: bool) -> Iterator[torch.Tensor]:
    # One convolution call per latent frame rounds differently from one call for all.
    for part in latents.split(latents.shape[2] if whole else 1, dim=2):
        with torch.no_grad():
            states = vae.post_quant_conv(part)
        yield from states.split(1, dim=2)


def gather_tile(
    parts: Iterable[torch.Tensor], latents: torch.Tensor, check: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Decode a latent tile [1, C, T, h, w] to unclamped [3, 4(T - 1) + 1, Ph, Pw] fp32 on the CPU.

    Args:
        parts: frames decoded on demand, see `decoded_frames`.
        latents: the tile, for its size.
        check: called before every latent frame. May raise to end the decode.
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
    """Return a tile's part of [1, C, T, h, w], as a view."""
    rows = tile.rows
    columns = tile.columns
    return latents[:, :, :, rows.start : rows.stop, columns.start : columns.stop]


def empty_frames(latents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate frames for raw latents [B, C, T, h, w]: [B, 4(T - 1) + 1, Ph, Pw, 3] on the CPU."""
    return torch.empty(latents.shape[0], *_decoded_size(latents), 3, dtype=dtype)


def _decoded_size(latents: torch.Tensor) -> tuple[int, int, int]:
    """Return (frames, height, width) of the decoded video, in pixels."""
    _, channels, count, height, width = latents.shape
    pixels = space_of(channels).pixels
    return FRAMES_PER_LATENT * (count - 1) + 1, pixels * height, pixels * width


RIGHT = -1
"""Key of the last tile's right edge. Lower edges have their column as key."""


def as_pixels(decoded: torch.Tensor) -> torch.Tensor:
    """Convert decoder output [3, F, H, W] in about -1..1 to [F, H, W, 3] in 0..1, in place."""
    return decoded.movedim(0, -1).clamp_(-1, 1).add_(1).div_(2)


def convert_pixels(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert pixels in 0..1 to `dtype`: fp32 for images, uint8 for video files.

    Overwrites `pixels`.
    """
    if dtype == torch.uint8:
        # Rounded, because the cast to uint8 cuts off the fraction.
        return pixels.mul_(255).round_().to(dtype)
    return pixels.to(dtype)


class TileBlender:
    """Blends tiles, added in any order, into the frames `into`.

    `into` is [F, H, W, 3] on the CPU: fp32 in 0..1, or uint8 in 0..255. In addition to it, RAM
    holds tile edges until the neighbours are decoded, and tiles that were added before their turn.
    """

    def __init__(self, tiling: Tiling, *, into: torch.Tensor) -> None:
        height, width = (size // tiling.per_latent for size in into.shape[1:3])
        self._tiling = tiling
        self._frames = into
        self._tiles = tiling.tiles(height, width)
        self._blended = tiling.blended if tiling.cuts(height, width) else 0
        self._pending: dict[tuple[int, int], torch.Tensor] = {}
        # Edges of placed tiles to blend later tiles with, by edge and first frame, fp32 [3, n, h,
        # w]: RIGHT, or the column of a lower edge. A tile's edges replace the ones that it has
        # read.
        self._edges: dict[tuple[int, int], torch.Tensor] = {}
        self._placed_tiles = 0
        self._placed_frames = 0  # of the next tile

    def put(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Add a tile as returned by `decode_tile`. Overwrites its memory.

        Raises:
            StateError: the tile was added before.
        """
        index = self._tiles.index(tile)
        key = (tile.row, tile.column)
        begun = index == self._placed_tiles and self._placed_frames > 0
        if index < self._placed_tiles or begun or key in self._pending:
            raise StateError(f"the tile in row {tile.row}, column {tile.column} was added before")
        self._pending[key] = decoded
        # Blend in one fixed order, not in arrival order: the last bits depend on it.
        while self._placed_tiles < len(self._tiles):
            due = self._tiles[self._placed_tiles]
            pending = self._pending.pop((due.row, due.column), None)
            if pending is None:
                return
            self._place(due, pending)

    def add_frames(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Add a tile's next frames, [3, n, h, w] on the CPU. Overwrites their memory.

        Tiles are added row by row, with all frames of one before the next, each in the same
        portions.

        Raises:
            StateError: another tile is next, or the tile has more frames than the video.
        """
        if self._placed_tiles == len(self._tiles) or self._tiles[self._placed_tiles] != tile:
            raise StateError(
                f"the tile in row {tile.row}, column {tile.column} is not the next one"
            )
        frames = self._placed_frames + decoded.shape[1]
        if frames > len(self._frames):
            raise StateError(f"the tile has {frames} frames or more, the video {len(self._frames)}")
        self._place(tile, decoded)

    def _place(self, tile: Tile, decoded: torch.Tensor) -> None:
        frames = slice(self._placed_frames, self._placed_frames + decoded.shape[1])
        # First with the tile above, then with the tile to the left, and edges are stored after
        # blending. This is diffusers' order, and the last bits depend on it.
        edges = ((tile.row, tile.column, 2), (tile.column, RIGHT, 3))
        for index, edge, dim in edges:
            if index > 0:
                before = self._edges[edge, frames.start]
                _blend(before, decoded, self._blended, self._tiling.patch, dim=dim)
        if len(self._tiles) > 1:
            for _, edge, dim in edges:
                lines = min(self._blended, decoded.shape[dim])
                last = decoded.narrow(dim, decoded.shape[dim] - lines, lines)
                self._keep_edge(edge, frames.start, last)
        top = self._tiling.per_latent * tile.rows.start
        left = self._tiling.per_latent * tile.columns.start
        target = self._frames[frames, top:, left:]
        if len(self._tiles) > 1:
            # The overlap behind the stride belongs to the next tile and is blended there.
            target = target[:, : self._tiling.stride, : self._tiling.stride]
        pixels = as_pixels(decoded[:, :, : target.shape[1], : target.shape[2]])
        target.copy_(convert_pixels(pixels, target.dtype))
        self._placed_frames = frames.stop
        if self._placed_frames == len(self._frames):
            self._placed_tiles += 1
            self._placed_frames = 0

    def _keep_edge(self, edge: int, first_frame: int, lines: torch.Tensor) -> None:
        before = self._edges.get((edge, first_frame))
        # The previous edge was already read, so its memory is reused. Otherwise a copy, because
        # `lines` is a view.
        if before is not None and before.shape == lines.shape:
            before.copy_(lines)
        else:
            self._edges[edge, first_frame] = lines.clone()


def _blend(before: torch.Tensor, after: torch.Tensor, extent: int, patch: int, *, dim: int) -> None:
    """Fade from the last `extent` lines of `before` to the first of `after`, in place.

    A step has `patch` lines.
    """
    assert before.shape[1] == after.shape[1], "every tile is added in the same portions of frames"
    steps = min(before.shape[dim], after.shape[dim], extent) // patch
    start = before.shape[dim] - steps * patch
    for at in range(steps):
        old = before.narrow(dim, start + at * patch, patch)
        new = after.narrow(dim, at * patch, patch)
        new.copy_(old * (1 - at / steps) + new * (at / steps))
