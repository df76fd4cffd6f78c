"""A loaded VAE decodes one video: frames leave the device as they are made, whole or tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ..plan.vae_tiles import Tiling
from .mosaic import Mosaic, as_pixels, stored_as
from .vae_tiles import crop, decoded_frames

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

Check = Callable[[], None]
"""Called before every latent frame; ends the decode by raising."""


def whole_frames(
    vae: AutoencoderKLWan, latents: torch.Tensor, dtype: torch.dtype, check: Check
) -> Iterator[torch.Tensor]:
    """Raw latents [1, C, T, h, w] on the VAE's device -> [1, Ph, Pw, 3], then T - 1 times [4, Ph, Pw, 3], on the CPU.

    fp32 in 0..1, or uint8 in 0..255. C, P: as in `vae_tiles`.
    """
    check()
    for part in decoded_frames(vae, latents, whole=True):
        yield stored_as(as_pixels(part.float()), dtype).cpu()
        check()


def tiled_frames(
    vae: AutoencoderKLWan, latents: torch.Tensor, tiling: Tiling, into: torch.Tensor, check: Check
) -> None:
    """Decode raw latents [1, C, T, h, w] tile by tile into frames [4(T - 1) + 1, Ph, Pw, 3], fp32 or uint8 on the CPU.

    Every tile goes over as it is made: beside the frames RAM holds the edges that meet other tiles.
    """
    mosaic = Mosaic(tiling, into=into)
    for tile in tiling.tiles(*latents.shape[3:]):
        check()
        for part in decoded_frames(vae, crop(latents, tile)):
            mosaic.put_frames(tile, part.cpu().float())
            check()
