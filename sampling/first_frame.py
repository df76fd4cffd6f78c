"""The start image of an I2V run in native form: what ComfyUI's own `WanImageToVideo` hands to a sampler."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from ..plan.shapes import FRAMES_PER_LATENT, VideoShape

GREY = 0.5
"""What the frames to be made are filled with before encoding: 0 in the VAE's range of -1..1."""


def start_video(images: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """`images` [N, H, W, 3 or 4], 0..1, as the first frames of a grey video [frames, height, width, 3].

    They are cropped around their centre to the video's aspect ratio, then scaled. Images beyond the last frame are
    left out. Raises ValueError for anything but images.
    """
    if images.ndim != 4 or images.shape[-1] < 3 or 0 in images.shape:
        raise ValueError(f"the start image is {list(images.shape)}: give images [N, H, W, 3]")
    pixels = images[: shape.frames, ..., :3].movedim(-1, 1)
    fitted = interpolate(_crop_to_aspect(pixels, shape), size=(shape.height, shape.width), mode="bilinear")
    video = torch.full((shape.frames, shape.height, shape.width, 3), GREY, dtype=images.dtype, device=images.device)
    video[: len(fitted)] = fitted.movedim(1, -1)
    return video


def start_mask(known_frames: int, shape: VideoShape) -> torch.Tensor:
    """[1, 1, T, h, w] float32 over the latent: 0 where the first `known_frames` lie, 1 where the model is free."""
    mask = torch.ones(1, 1, *shape.latent)
    mask[:, :, : (known_frames - 1) // FRAMES_PER_LATENT + 1] = 0
    return mask


def _crop_to_aspect(pixels: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """The largest centred part of `pixels` [N, C, H, W] with the aspect ratio of the video, to whole pixels."""
    height, width = pixels.shape[-2:]
    aspect, wanted = width / height, shape.width / shape.height
    # ComfyUI rounds the margin, not the size; the same order of operations keeps its result to the pixel.
    left = round((width - width * (wanted / aspect)) / 2) if aspect > wanted else 0
    top = round((height - height * (aspect / wanted)) / 2) if aspect < wanted else 0
    return pixels[..., top : height - top, left : width - left]
