"""Tiles of a decode: their layout, overlaps and the frames decoded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ..latent_space import space_of

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


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


def decoded_frames(vae: AutoencoderKLWan, latents: torch.Tensor, *, whole: bool = False) -> Iterator[torch.Tensor]:
    """Raw latents [1, C, T, h, w] -> frames as they are made: [3, 1, Ph, Pw], then T - 1 times [3, 4, Ph, Pw].

    fp32 on the device of `latents`, around -1 to 1, not clamped. The decoder looks back only, so a frame never changes.

    Args:
        whole: whether the frames shall be those of `AutoencoderKLWan.decode` without tiles, bit for bit, not those of
            its tiles: the first of its convolutions takes all latent frames at once there, and one by one in a tile.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

    seen: list[object] = [None] * sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    for at, states in enumerate(_states(vae, latents, whole)):
        with torch.no_grad():
            frames = vae.decoder(states, feat_cache=seen, feat_idx=[0], first_chunk=at == 0)
        if vae.config.patch_size is not None:
            frames = unpatchify(frames, patch_size=vae.config.patch_size)
        yield frames[0]


def _states(vae: AutoencoderKLWan, latents: torch.Tensor, whole: bool) -> Iterator[torch.Tensor]:
    for part in latents.split(latents.shape[2] if whole else 1, dim=2):
        with torch.no_grad():
            states = vae.post_quant_conv(part)
        yield from states.split(1, dim=2)


def decode_tile(vae: AutoencoderKLWan, latents: torch.Tensor, check: Callable[[], None] = lambda: None) -> torch.Tensor:
    """One tile of raw latents [1, C, T, h, w] -> [3, 4(T - 1) + 1, Ph, Pw] fp32 on the CPU, not clamped.

    `check` is called before every latent frame, and ends the decode by raising.
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
    """The part of [1, C, T, h, w] that a tile shows; no copy."""
    rows, columns = tile.rows, tile.columns
    return latents[:, :, :, rows.start : rows.stop, columns.start : columns.stop]


def empty_frames(latents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Room for the frames of raw latents [B, C, T, h, w]: [B, 4(T - 1) + 1, Ph, Pw, 3] on the CPU."""
    return torch.empty(latents.shape[0], *_decoded_size(latents), 3, dtype=dtype)


def _decoded_size(latents: torch.Tensor) -> tuple[int, int, int]:
    """(frames, height, width) of the video."""
    _, channels, count, height, width = latents.shape
    pixels = space_of(channels).pixels
    return FRAMES_PER_LATENT * (count - 1) + 1, pixels * height, pixels * width
