"""Tiles of a decode: layout, overlaps and decoding.

In shapes, P is the number of pixels for each latent pixel, along either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT
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


def decode_tile(vae: AutoencoderKLWan, latents: torch.Tensor, check: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Decode one tile of raw latents [1, C, T, h, w] to [3, 4(T - 1) + 1, Ph, Pw] fp32 on the CPU, not clamped.

    `check` is called before every latent frame and may raise to end the decode.
    """
    whole = torch.empty(3, *_decoded_size(latents))
    done = 0
    check()
    for part in decoded_frames(vae, latents):
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
