"""Masked denoising: a part of the latent is generated, the rest is kept.

A noise mask has ComfyUI's meaning: 1 where the model generates, 0 where the given latent is kept,
and a blend between. A14B reads the kept part at the step's noise level. TI2V-5B reads it without
noise, with per-frame timesteps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate

from ..steps.errors import ConditioningError

FRAME_MASK_DIMS = (2, 3, 4)
VIDEO_MASK_DIMS = 5


def latent_mask(noise_mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scale a LATENT's `noise_mask` to a latent with `shape` [B, C, T, h, w], as ComfyUI does.

    Args:
        noise_mask: [H, W], [frames, H, W], [frames, 1, H, W], [1, frames, H, W] or [1 or a divisor
            of B, 1 or C, frames, H, W], with any number of frames, height and width.

    Returns [1 or B, 1 or C, T, h, w] float32.

    Raises:
        ConditioningError: the mask has another shape, or contains NaN or infinity.
    """
    given = list(noise_mask.shape)
    if noise_mask.ndim not in (*FRAME_MASK_DIMS, VIDEO_MASK_DIMS) or 0 in given:
        raise ConditioningError(
            f"the noise mask is {given}: give [height, width], [frames, height, width] or "
            "[batch, 1, frames, height, width]"
        )
    if noise_mask.ndim == 4 and 1 not in given[:2]:
        raise ConditioningError(
            f"the noise mask is {given}: give [frames, 1, height, width], one channel"
        )
    if noise_mask.ndim == VIDEO_MASK_DIMS:
        _check_video_mask(given, shape)
        mask = noise_mask.float()
    else:
        # ComfyUI reads all dimensions before height and width as frames, even if a node meant a
        # batch.
        mask = noise_mask.float().reshape(1, 1, -1, *noise_mask.shape[-2:])
    if not mask.isfinite().all():
        raise ConditioningError(
            f"the noise mask {given} contains NaN or infinity: give values from 0 to 1"
        )
    # Frames are scaled too, so a mask for video frames fits the latent ones.
    scaled = interpolate(mask, size=shape[2:], mode="trilinear")
    if len(scaled) == 1:
        return scaled
    return scaled.repeat(shape[0] // len(scaled), 1, 1, 1, 1)


def _check_video_mask(given: list[int], shape: torch.Size) -> None:
    if given[1] not in (1, shape[1]):
        raise ConditioningError(
            f"the noise mask {given} has {given[1]} channels: give 1, or {shape[1]} as the latent "
            f"{list(shape)}"
        )
    if shape[0] % given[0]:
        raise ConditioningError(
            f"the noise mask {given} is for {given[0]} videos, the latent {list(shape)} has "
            f"{shape[0]}: give one mask for all, or one for each"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedPart:
    """Kept part in a masked run: float32 tensors on the device that broadcast to the latents."""

    free: torch.Tensor
    """Mask: 1 where the model generates."""
    latent: torch.Tensor
    """Given latent where it is kept, 0 elsewhere."""
    noise: torch.Tensor | None
    """Starting noise where the latent is kept, 0 elsewhere. None: the model reads the kept part
    without noise."""

    @classmethod
    def of(cls, mask: torch.Tensor, latent: torch.Tensor, noise: torch.Tensor | None) -> MaskedPart:
        """Return the kept part for a given latent and starting noise, both normalised.

        Both are [B, 16 or 48, T, h, w].
        """
        kept = 1 - mask
        if noise is not None:
            noise = noise * kept
        return cls(free=mask, latent=latent * kept, noise=noise)

    def model_input(self, latents: torch.Tensor, sigma: float) -> torch.Tensor:
        """Return the model's input: generated latents, and elsewhere the given ones at `sigma`."""
        if self.noise is None:
            return latents * self.free + self.latent
        return latents * self.free + sigma * self.noise + (1 - sigma) * self.latent

    def merge_kept(self, denoised: torch.Tensor) -> torch.Tensor:
        """Return the final latent estimate with the given latent where it is kept."""
        return denoised * self.free + self.latent
