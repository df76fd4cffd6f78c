"""Masked denoising: part of a latent is made anew, the rest is kept, with ComfyUI's meaning of a noise mask.

A mask is 1 where the model is free and 0 where the given latent stays; values between mix. The kept part is shown to
the model at the noise level of the step, so that what is made anew fits it; to TI2V-5B without noise, and at a timestep
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate

from ..errors import ConditioningError

FRAME_MASK_DIMS = (2, 3, 4)
VIDEO_MASK_DIMS = 5


def latent_mask(noise_mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A LATENT's `noise_mask` for a latent of `shape` [B, 16, T, h, w], as ComfyUI reads it.

    `noise_mask` is [H, W], [frames, H, W], [frames, 1, H, W], [1, frames, H, W] or [1 or a divisor of B, 1 or 16,
    frames, H, W] (or 48 for such a latent), of any frames, height and width: they are scaled to the latent's. Returns
    [1 or B, 1 or 16, T, h, w] float32. Raises `ConditioningError` for other shapes and for NaN.
    """
    given = list(noise_mask.shape)
    if noise_mask.ndim not in (*FRAME_MASK_DIMS, VIDEO_MASK_DIMS) or 0 in given:
        raise ConditioningError(
            f"the noise mask is {given}: give [height, width], [frames, height, width] or "
            "[batch, 1, frames, height, width]"
        )
    if noise_mask.ndim == 4 and 1 not in given[:2]:
        raise ConditioningError(f"the noise mask is {given}: give [frames, 1, height, width], one channel")
    if noise_mask.ndim == VIDEO_MASK_DIMS:
        _check_video_mask(given, shape)
        mask = noise_mask.float()
    else:
        # ComfyUI reads whatever lies before height and width as frames, even where another node meant a batch.
        mask = noise_mask.float().reshape(1, 1, -1, *noise_mask.shape[-2:])
    if not mask.isfinite().all():
        raise ConditioningError(f"the noise mask {given} holds NaN or infinity: give values from 0 to 1")
    scaled = interpolate(mask, size=shape[2:], mode="trilinear")
    return scaled if len(scaled) == 1 else scaled.repeat(shape[0] // len(scaled), 1, 1, 1, 1)


def _check_video_mask(given: list[int], shape: torch.Size) -> None:
    if given[1] not in (1, shape[1]):
        raise ConditioningError(
            f"the noise mask {given} has {given[1]} channels: give 1, or {shape[1]} as the latent {list(shape)}"
        )
    if shape[0] % given[0]:
        raise ConditioningError(
            f"the noise mask {given} is for {given[0]} videos, the latent {list(shape)} has {shape[0]}: "
            "give one mask for all, or one for each"
        )


def frame_freedom(mask: torch.Tensor) -> tuple[tuple[float, ...] | None, ...]:
    """How free each latent frame is, for each sample of `mask` [B, C, T, h, w]; None for one that is free throughout.

    That is the mean of the mask over a frame, in float32, by which ComfyUI tells TI2V-5B the frame's timestep.
    """
    every: list[list[float]] = mask.float().mean(dim=(1, 3, 4)).tolist()
    return tuple(None if set(freedom) == {1.0} else tuple(freedom) for freedom in every)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedPart:
    """What a masked run keeps. All tensors are float32 on the run's device and of shapes that broadcast to it."""

    free: torch.Tensor
    """The mask: 1 where the model is free."""
    latent: torch.Tensor
    """The latent where it is kept, 0 elsewhere."""
    noise: torch.Tensor | None
    """The starting noise, likewise; None: the model is shown the kept part without noise, at any step."""

    @classmethod
    def of(cls, mask: torch.Tensor, latent: torch.Tensor, noise: torch.Tensor | None) -> MaskedPart:
        """Of a run whose given latent and starting noise are [B, 16 or 48, T, h, w], normalised."""
        kept = 1 - mask
        return cls(free=mask, latent=latent * kept, noise=None if noise is None else noise * kept)

    def model_input(self, latents: torch.Tensor, sigma: float) -> torch.Tensor:
        """The latents that the model sees: those of the run where it is free, the given ones at `sigma` elsewhere."""
        if self.noise is None:
            return latents * self.free + self.latent
        return latents * self.free + sigma * self.noise + (1 - sigma) * self.latent

    def merge_kept(self, denoised: torch.Tensor) -> torch.Tensor:
        """The model's estimate of the end, with the given latent where it is kept."""
        return denoised * self.free + self.latent
