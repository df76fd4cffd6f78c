"""ComfyUI's latent preview next to the progress bar."""

from __future__ import annotations

from typing import Any

import comfy.latent_formats
import latent_preview
import torch

from ...wan import WAN21, WAN22, space_of

FORMATS = {WAN21: comfy.latent_formats.Wan21, WAN22: comfy.latent_formats.Wan22}


class LatentPreview:
    """Preview images by the method that the user has chosen in ComfyUI; none by default.

    latent2rgb multiplies the first frame's latent [C, h, w] with a C x 3 matrix; taesd decodes that frame with the
    small VAE of `vae_approx`.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Prepare previews of latents [B, C, T, h, w] with the channels and on the device of `like`."""
        self._previewer: Any = latent_preview.get_previewer(like.device, FORMATS[space_of(like.shape[1])]())

    def image(self, denoised: torch.Tensor) -> object | None:
        """Return the preview image of `denoised` [B, C, T, h, w], normalised; None if previews are disabled."""
        if self._previewer is None:
            return None
        image: object = self._previewer.decode_latent_to_preview_image("JPEG", denoised)
        return image
