"""A video decoded tile by tile: what is computed at once is one tile and one latent frame, whatever the video.

Tiles may be decoded by anyone, in any order; a `Mosaic` makes of them the picture of `AutoencoderKLWan.tiled_decode`,
bit for bit. C, P: the channels of the VAE's latents, and the pixels for each of its latent pixels, 8 or 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ..plan.shapes import FRAMES_PER_LATENT
from ..plan.vae_tiles import Tile
from .latent_space import space_of

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


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
