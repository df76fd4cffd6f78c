"""A video decoded tile by tile: what is computed at once is one tile and one latent frame, whatever the video.

Tiles may be decoded by anyone, in any order; `Mosaic` blends them in the order that diffusers does, so that the picture
is that of `AutoencoderKLWan.tiled_decode` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

from ..plan.shapes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ..plan.vae_tiles import Tile, Tiling

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


def decoded_frames(vae: AutoencoderKLWan, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """Raw latents [1, 16, T, h, w] -> frames as they are made: [3, 1, 8h, 8w], then T - 1 times [3, 4, 8h, 8w].

    fp32 on the device of `latents`, around -1 to 1, not clamped. The decoder looks back only, so a frame never changes.
    """
    seen: list[object] = [None] * sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    for at in range(latents.shape[2]):
        with torch.no_grad():
            states = vae.post_quant_conv(latents[:, :, at : at + 1])
            frames = vae.decoder(states, feat_cache=seen, feat_idx=[0], first_chunk=at == 0)
        yield frames[0]


def decode_tile(vae: AutoencoderKLWan, latents: torch.Tensor, check: Callable[[], None] = lambda: None) -> torch.Tensor:
    """One tile of raw latents [1, 16, T, h, w] -> [3, 4(T - 1) + 1, 8h, 8w] fp32 on the CPU, not clamped.

    `check` is called before every latent frame, and ends the decode by raising.
    """
    _, _, count, height, width = latents.shape
    frames = FRAMES_PER_LATENT * (count - 1) + 1
    whole = torch.empty(3, frames, PIXELS_PER_LATENT * height, PIXELS_PER_LATENT * width)
    done = 0
    check()
    for part in decoded_frames(vae, latents):
        whole[:, done : done + part.shape[1]] = part
        done += part.shape[1]
        check()
    return whole


def crop(latents: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The part of [1, 16, T, h, w] that a tile shows; no copy."""
    rows, columns = tile.rows, tile.columns
    return latents[:, :, :, rows.start : rows.stop, columns.start : columns.stop]


def empty_frames(latents: torch.Tensor) -> torch.Tensor:
    """Room for the frames of raw latents [B, 16, T, h, w]: [B, 4(T - 1) + 1, 8h, 8w, 3] fp32 on the CPU."""
    batch, _, count, height, width = latents.shape
    frames = FRAMES_PER_LATENT * (count - 1) + 1
    return torch.empty(batch, frames, PIXELS_PER_LATENT * height, PIXELS_PER_LATENT * width, 3)


class MosaicError(RuntimeError):
    """A tile was put twice, or the frames were asked for before all tiles were there."""


class Mosaic:
    """Tiles in any order -> frames in 0..1, written into `into`, [F, 8h, 8w, 3] fp32 on the CPU.

    Beside the frames it holds the tiles whose neighbours are still to come: one row of them, and what came too early.
    """

    def __init__(self, tiling: Tiling, *, into: torch.Tensor) -> None:
        height, width = (size // PIXELS_PER_LATENT for size in into.shape[1:3])
        self._tiling, self._frames = tiling, into
        self._tiles = tiling.tiles(height, width)
        self._blended = tiling.blended if tiling.cuts(height, width) else 0
        self._early: dict[tuple[int, int], torch.Tensor] = {}
        self._above: dict[int, torch.Tensor] = {}
        self._row: dict[int, torch.Tensor] = {}
        self._placed = 0

    @property
    def frames(self) -> torch.Tensor:
        """All frames. Raises MosaicError while tiles are missing."""
        if self._placed < len(self._tiles):
            raise MosaicError(f"{len(self._tiles) - self._placed} of {len(self._tiles)} tiles are missing")
        return self._frames

    def put(self, tile: Tile, decoded: torch.Tensor) -> None:
        """Take a tile as `decode_tile` gives it; its memory is written to. Raises MosaicError for one that was put."""
        number = self._tiles.index(tile)
        if number < self._placed or (tile.row, tile.column) in self._early:
            raise MosaicError(f"the tile in row {tile.row}, column {tile.column} was put before")
        self._early[tile.row, tile.column] = decoded
        while self._placed < len(self._tiles):
            due = self._tiles[self._placed]
            waiting = self._early.pop((due.row, due.column), None)
            if waiting is None:
                return
            self._place(due, waiting)
            self._placed += 1

    def _place(self, tile: Tile, decoded: torch.Tensor) -> None:
        if tile.column == 0:
            self._above, self._row = self._row, {}
        if tile.row > 0:
            _blend(self._above.pop(tile.column), decoded, self._blended, dim=2)
        if tile.column > 0:
            _blend(self._row[tile.column - 1], decoded, self._blended, dim=3)
        self._row[tile.column] = decoded
        top, left = PIXELS_PER_LATENT * tile.rows.start, PIXELS_PER_LATENT * tile.columns.start
        place = self._frames[:, top:, left:]
        if len(self._tiles) > 1:
            place = place[:, : self._tiling.stride, : self._tiling.stride]
        shown = decoded[:, :, : place.shape[1], : place.shape[2]].movedim(0, -1)
        place.copy_(shown.clamp(-1, 1).add_(1).div_(2))


def _blend(before: torch.Tensor, after: torch.Tensor, extent: int, *, dim: int) -> None:
    """Fade from the last `extent` lines of `before` to the first of `after`, written into `after`."""
    extent = min(before.shape[dim], after.shape[dim], extent)
    for at in range(extent):
        old, new = before.select(dim, before.shape[dim] - extent + at), after.select(dim, at)
        new.copy_(old * (1 - at / extent) + new * (at / extent))
