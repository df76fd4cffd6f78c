"""Control videos and contexts of Fun Control and Bernini, in the form of ComfyUI's own nodes.

These are `Wan22FunControlToVideo`, `WanFunControlToVideo` and `BerniniConditioning`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import interpolate

from ...schema import FRAMES_PER_LATENT, VideoShape
from ...wan import WAN21, LatentSpace, denormalise
from .first_frame import fitted, start_end_mask

SIDE_STEP = 16
"""Pixels to whose multiples the sides of a reference are rounded: two latent pixels, which are one token."""


def whole_latent_frames(images: torch.Tensor, frames: int) -> torch.Tensor:
    """Return the first 4n + 1 of at most `frames` images [N, H, W, C]: the frames that the VAE encodes.

    Raises:
        ValueError: these are not images.
    """
    if images.ndim != 4 or images.shape[-1] < 3 or 0 in images.shape:
        raise ValueError(f"a video or an image is {list(images.shape)}: give images [N, H, W, 3]")
    count = min(len(images), frames)
    return images[: (count - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1, ..., :3]


def fitted_video(images: torch.Tensor, shape: VideoShape, *, mode: str = "bilinear") -> torch.Tensor:
    """Return the frames of `images` that a video of `shape` has, cropped around their centre and scaled."""
    return fitted(whole_latent_frames(images, shape.frames), shape, mode=mode)


def fitted_reference(images: torch.Tensor, frames: int, longest: int) -> torch.Tensor:
    """Return at most `frames` images with their own aspect ratio, no side longer than `longest` pixels."""
    taken = whole_latent_frames(images, frames)
    return interpolate(taken.movedim(-1, 1), size=reference_size(taken, longest), mode="area").movedim(1, -1)


def reference_size(images: torch.Tensor, longest: int) -> tuple[int, int]:
    """Return (height, width) of fitted references.

    Smaller images are not enlarged; both sides are rounded to multiples of 16 pixels.
    """
    height, width = images.shape[1:3]
    scale = min(longest / max(height, width), 1.0)
    height, width = (max(SIDE_STEP, round(side * scale / SIDE_STEP) * SIDE_STEP) for side in (height, width))
    return height, width


def control_latents(
    control: torch.Tensor, start: torch.Tensor | None, shape: VideoShape, space: LatentSpace = WAN21
) -> torch.Tensor:
    """Return `concat_latent_image` of Fun Control, raw [1, 2 C, T, h, w]: the control video, then the start image.

    Args:
        control: raw latent [1, C, t, h, w] of the control video; frames after it are empty.
        start: raw latent of the start images, likewise; None: all frames are empty.
        shape: size of the video.
        space: its latent space.
    """
    joined = denormalise(torch.zeros(1, space.channels, *shape.latent)).repeat(1, 2, 1, 1, 1)
    joined[:, : space.channels, : control.shape[2]] = control
    if start is not None:
        joined[:, space.channels :, : start.shape[2]] = start
    return joined


def control_mask(start_frames: int, shape: VideoShape) -> torch.Tensor:
    """Return `concat_mask` of Fun Control [1, 4, T, h, w]: 0 in the entries of the start images, 1 elsewhere."""
    if start_frames == 0:
        return torch.ones(1, FRAMES_PER_LATENT, *shape.latent)
    return start_end_mask(start_frames, 0, shape)


def reference_streams(images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split batches of images [N, H, W, 3] into single ones: each of them is a context of its own."""
    return [image for batch in images for image in batch.split(1)]
