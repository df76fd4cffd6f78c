"""Given frames for an image-to-video run, in the form of ComfyUI's own nodes.

These are `WanImageToVideo` (first frames), `WanFirstLastFrameToVideo` (first and last frames) and
`Wan22ImageToVideoLatent` (first frames inside the latent).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch.nn.functional import interpolate

from ...shapes import FRAMES_PER_LATENT, VideoShape
from ...wan.latents import denormalise
from .conditioning_keys import IMAGE_KEY, MASK_KEY

Encode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Encoder from frames [N, H, W, 3] in 0..1 to raw latents [1, C, t, h, w]."""

GREY = 0.5
"""Pixel value before encoding, for frames to generate: 0 in the VAE's range of -1..1."""


def start_image_values(
    encode: Encode, start: torch.Tensor, end: torch.Tensor | None, shape: VideoShape
) -> dict[str, object]:
    """Return values for both prompts, for a video that begins with `start` and ends with `end`.

    Raises:
        ValueError: the shape is not an image shape, or there are more images than frames.
    """
    video = video_with_start_end(start, end, shape)
    mask = start_mask(len(start), shape)
    if end is not None:
        mask = start_end_mask(len(start), len(end), shape)
    return {IMAGE_KEY: encode(video), MASK_KEY: mask}


def video_with_start_end(
    start: torch.Tensor, end: torch.Tensor | None, shape: VideoShape
) -> torch.Tensor:
    """Return a grey video [frames, height, width, 3] that begins with `start` and ends with `end`.

    Both are images [N, H, W, 3 or 4] in 0..1, cropped around their centre to the video's aspect
    ratio and then scaled.

    Raises:
        ValueError: the shape is not an image shape, or there are more images than frames.
    """
    given = {"start": start}
    if end is not None:
        given["end"] = end
    _check_images(given, shape)
    video = torch.full(
        (shape.frames, shape.height, shape.width, 3), GREY, dtype=start.dtype, device=start.device
    )
    video[: len(start)] = fitted(start, shape)
    if end is not None:
        video[-len(end) :] = fitted(end, shape)
    return video


def start_mask(known_frames: int, shape: VideoShape) -> torch.Tensor:
    """Return a float32 mask [1, 1, T, h, w]: 0 in latents of the first `known_frames`, else 1."""
    mask = torch.ones(1, 1, *shape.latent)
    # The first latent frame holds one frame, each other one four.
    mask[:, :, : (known_frames - 1) // FRAMES_PER_LATENT + 1] = 0
    return mask


def start_end_mask(start_frames: int, end_frames: int, shape: VideoShape) -> torch.Tensor:
    """Return a mask [1, 4, T, h, w] float32: four entries per latent frame, 0 for given frames.

    A video's first frame has all four entries of the first latent frame, every other frame one
    entry.
    """
    latent_frames, height, width = shape.latent
    places = torch.ones(latent_frames * FRAMES_PER_LATENT)
    if start_frames:
        places[: start_frames + FRAMES_PER_LATENT - 1] = 0
    # Not `-end_frames`, because `places[-0:]` is everything.
    places[len(places) - end_frames :] = 0
    mask = places.view(1, latent_frames, FRAMES_PER_LATENT, 1, 1).transpose(1, 2)
    return mask.expand(-1, -1, -1, height, width).contiguous()


def start_frames(start: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """Return `start`, cropped and scaled, as first frames for Wan2.2 5B, [N, height, width, 3].

    Raises:
        ValueError: the shape is not an image shape, there are more images than frames, or their
            number is not 4n + 1.
    """
    _check_images({"start": start}, shape)
    if len(start) % FRAMES_PER_LATENT != 1:
        less = (len(start) - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
        raise ValueError(
            f"{len(start)} start images: Wan2.2 5B takes {FRAMES_PER_LATENT}n + 1, give the first "
            f"{less}"
        )
    return fitted(start, shape)


def latent_with_first_frames(
    encode: Encode, start: torch.Tensor, shape: VideoShape, batch: int
) -> dict[str, torch.Tensor]:
    """Return a LATENT for Wan2.2 5B that begins with the images `start` and is empty after them.

    `noise_mask` [1, 1, T, h, w] is 0 in the given latent frames and 1 elsewhere.

    Raises:
        ValueError: see `start_frames`.
    """
    encoded = encode(start_frames(start, shape))
    samples = denormalise(torch.zeros(1, encoded.shape[1], *shape.latent))
    samples[:, :, : encoded.shape[2]] = encoded
    mask = start_mask(len(start), shape)
    return {"samples": samples.repeat(batch, 1, 1, 1, 1), "noise_mask": mask}


def _check_images(given: Mapping[str, torch.Tensor], shape: VideoShape) -> None:
    for name, images in given.items():
        if images.ndim != 4 or images.shape[-1] < 3 or 0 in images.shape:
            raise ValueError(f"the {name} image is {list(images.shape)}: give images [N, H, W, 3]")
    if sum(map(len, given.values())) > shape.frames:
        counts = " and ".join(f"{len(images)} {name} images" for name, images in given.items())
        raise ValueError(
            f"{counts} do not fit into {shape.frames} frames: give fewer, or raise frames"
        )


def fitted(images: torch.Tensor, shape: VideoShape, *, mode: str = "bilinear") -> torch.Tensor:
    """Crop images [N, H, W, 3] around their centre to the video's aspect ratio, and scale them."""
    pixels = _crop_to_aspect(images[..., :3].movedim(-1, 1), shape)
    # Without antialiasing, as in ComfyUI's `common_upscale`.
    return interpolate(pixels, size=(shape.height, shape.width), mode=mode).movedim(1, -1)


def _crop_to_aspect(pixels: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """Return the largest centred part of `pixels` [N, C, H, W] with the video's aspect ratio."""
    height, width = pixels.shape[-2:]
    aspect = width / height
    wanted = shape.width / shape.height
    # ComfyUI rounds the margin, not the size. Another order of operations crops one pixel more or
    # less.
    left = round((width - width * (wanted / aspect)) / 2) if aspect > wanted else 0
    top = round((height - height * (aspect / wanted)) / 2) if aspect < wanted else 0
    return pixels[..., top : height - top, left : width - left]
