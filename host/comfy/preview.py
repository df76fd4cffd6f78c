"""ComfyUI's own preview of a latent: what its samplers show beside the progress bar."""

from __future__ import annotations

from typing import Any

import comfy.latent_formats
import latent_preview
import torch

from ...wan import WAN21, WAN22, space_of

FORMATS = {WAN21: comfy.latent_formats.Wan21, WAN22: comfy.latent_formats.Wan22}


class LatentPreview:
    """Pictures of where a run is heading, by the method that the user has chosen; off by default, and then nothing.

    latent2rgb costs a product of the first frame's latent [C, h, w] with a C x 3 matrix; taesd decodes that frame with
    the small VAE of `vae_approx`.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Of latents [B, C, T, h, w] with the channels and on the device of `like`."""
        self._previewer: Any = latent_preview.get_previewer(like.device, FORMATS[space_of(like.shape[1])]())

    def picture(self, denoised: torch.Tensor) -> object | None:
        """What the progress bar shows of `denoised` [B, C, T, h, w], normalised; None where previews are off."""
        if self._previewer is None:
            return None
        picture: object = self._previewer.decode_latent_to_preview_image("JPEG", denoised)
        return picture
