"""Wan latent spaces: 16 channels (Wan2.1, Wan2.2 A14B) or 48 channels (Wan2.2 5B).

A VAE works in raw space, and ComfyUI's nodes exchange raw latents. The experts work in normalised
space: every channel has mean 0 and standard deviation 1 over the training videos.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...shapes import PIXELS_PER_LATENT, WAN22_PIXELS_PER_LATENT


class LatentSpaceError(ValueError):
    """Unsupported number of latent channels. The message lists the supported ones."""


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """Latent space of a VAE, with one frame for 4 and one latent pixel for a square of pixels."""

    channels: int
    pixels: int
    """Video pixels per latent pixel, along either side."""
    mean: tuple[float, ...]
    """Mean of each raw latent channel over the training videos."""
    std: tuple[float, ...]
    """Standard deviation of each channel, likewise."""
    models: str
    """Names of the models that use this space, for messages."""

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std) == self.channels


# The numbers are `latents_mean` and `latents_std` from diffusers' AutoencoderKLWan: its defaults,
# and the config of Wan-AI/Wan2.2-TI2V-5B-Diffusers.
# fmt: off
WAN21 = LatentSpace(
    channels=16,
    pixels=PIXELS_PER_LATENT,
    mean=(
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ),
    std=(
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ),
    models="Wan2.1 and Wan2.2 A14B",
)
WAN22 = LatentSpace(
    channels=48,
    pixels=WAN22_PIXELS_PER_LATENT,
    mean=(
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    std=(
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
    models="Wan2.2 5B",
)
# fmt: on

SPACES = (WAN21, WAN22)


def space_of(channels: int) -> LatentSpace:
    """Return the latent space with this number of channels.

    Raises:
        LatentSpaceError: the number is neither 16 nor 48.
    """
    for space in SPACES:
        if space.channels == channels:
            return space
    known = ", or ".join(f"{space.channels} ({space.models})" for space in SPACES)
    raise LatentSpaceError(f"latents of {channels} channels: a VAE of Wan has {known}")


def normalise(raw: torch.Tensor) -> torch.Tensor:
    """Normalise raw VAE latents [B, 16 or 48, T, h, w], with the same shape, dtype and device.

    Raises:
        LatentSpaceError: the latents have another number of channels.
    """
    space = space_of(raw.shape[1])
    return (raw - _per_channel(space.mean, raw)) / _per_channel(space.std, raw)


def denormalise(latents: torch.Tensor) -> torch.Tensor:
    """Map normalised latents back to raw ones, the inverse of `normalise`."""
    space = space_of(latents.shape[1])
    return latents * _per_channel(space.std, latents) + _per_channel(space.mean, latents)


def _per_channel(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values).to(like.device, like.dtype).view(1, len(values), 1, 1, 1)
