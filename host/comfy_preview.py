"""ComfyUI's own preview of a latent: what its samplers show beside the progress bar."""

from __future__ import annotations

from typing import Any

import comfy.latent_formats
import latent_preview
import torch


class LatentPreview:
    """Pictures of where a run is heading, by the method that the user has chosen; off by default, and then nothing.

    latent2rgb costs a product of the first frame's latent with a 16 x 3 matrix; taesd decodes that frame with the small
    VAE of `vae_approx`.
    """

    def __init__(self, device: torch.device) -> None:
        self._previewer: Any = latent_preview.get_previewer(device, comfy.latent_formats.Wan21())

    def picture(self, denoised: torch.Tensor) -> object | None:
        """What the progress bar shows of `denoised` [B, 16, T, h, w], normalised; None where previews are off."""
        if self._previewer is None:
            return None
        picture: object = self._previewer.decode_latent_to_preview_image("JPEG", denoised)
        return picture
