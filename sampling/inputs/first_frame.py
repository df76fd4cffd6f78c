"""Given frames of an image-to-video run, in the form of ComfyUI's own nodes.

These are `WanImageToVideo` (first frames), `WanFirstLastFrameToVideo` (first and last frames) and
`Wan22ImageToVideoLatent` (first frames as a part of the latent).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import interpolate

from ...schema import FRAMES_PER_LATENT, VideoShape
from ...wan import denormalise

GREY = 0.5
"""Value of the frames to generate before encoding: 0 in the VAE's range of -1..1."""


def video_with_start_end(start: torch.Tensor, end: torch.Tensor | None, shape: VideoShape) -> torch.Tensor:
    """Return a grey video [frames, height, width, 3] that begins with `start` and ends with `end`.

    Both are images [N, H, W, 3 or 4] in 0..1, cropped around their centre to the video's aspect ratio and then scaled.

    Raises:
        ValueError: the shape is not that of images, or there are more images than frames.
    """
    _check_images({"start": start} if end is None else {"start": start, "end": end}, shape)
    video = torch.full((shape.frames, shape.height, shape.width, 3), GREY, dtype=start.dtype, device=start.device)
    video[: len(start)] = fitted(start, shape)
    if end is not None:
        video[-len(end) :] = fitted(end, shape)
    return video


def start_mask(known_frames: int, shape: VideoShape) -> torch.Tensor:
    """Return a mask [1, 1, T, h, w] float32: 0 in the latent frames of the first `known_frames`, 1 elsewhere."""
    mask = torch.ones(1, 1, *shape.latent)
    mask[:, :, : (known_frames - 1) // FRAMES_PER_LATENT + 1] = 0
    return mask


def start_end_mask(start_frames: int, end_frames: int, shape: VideoShape) -> torch.Tensor:
    """Return a mask [1, 4, T, h, w] float32: four entries for each latent frame, 0 where a frame is given.

    The first frame of a video has all four entries of the first latent frame, every other frame one entry.
    """
    latent_frames, height, width = shape.latent
    places = torch.ones(latent_frames * FRAMES_PER_LATENT)
    places[: start_frames + FRAMES_PER_LATENT - 1] = 0
    places[len(places) - end_frames :] = 0
    mask = places.view(1, latent_frames, FRAMES_PER_LATENT, 1, 1).transpose(1, 2)
    return mask.expand(-1, -1, -1, height, width).contiguous()


def start_frames(start: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """Return `start` as the first frames of a video for Wan2.2 5B, [N, height, width, 3], cropped and scaled.

    Raises:
        ValueError: the shape is not that of images, there are more images than frames, or not 4n + 1 of them.
    """
    _check_images({"start": start}, shape)
    if len(start) % FRAMES_PER_LATENT != 1:
        less = (len(start) - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
        raise ValueError(f"{len(start)} start images: Wan2.2 5B takes {FRAMES_PER_LATENT}n + 1, give the first {less}")
    return fitted(start, shape)


def latent_with_first_frames(encoded: torch.Tensor, shape: VideoShape, batch: int) -> dict[str, torch.Tensor]:
    """Return a LATENT for Wan2.2 5B that begins with `encoded`, raw [1, C, t, h, w], and is empty after it.

    Its `noise_mask` [1, 1, T, h, w] is 0 in the given latent frames and 1 elsewhere.
    """
    samples = denormalise(torch.zeros(1, encoded.shape[1], *shape.latent))
    samples[:, :, : encoded.shape[2]] = encoded
    mask = torch.ones(1, 1, *shape.latent)
    mask[:, :, : encoded.shape[2]] = 0
    return {"samples": samples.repeat(batch, 1, 1, 1, 1), "noise_mask": mask}


def _check_images(given: Mapping[str, torch.Tensor], shape: VideoShape) -> None:
    for name, images in given.items():
        if images.ndim != 4 or images.shape[-1] < 3 or 0 in images.shape:
            raise ValueError(f"the {name} image is {list(images.shape)}: give images [N, H, W, 3]")
    if sum(map(len, given.values())) > shape.frames:
        counts = " and ".join(f"{len(images)} {name} images" for name, images in given.items())
        raise ValueError(f"{counts} do not fit into {shape.frames} frames: give fewer, or raise frames")


def fitted(images: torch.Tensor, shape: VideoShape, *, mode: str = "bilinear") -> torch.Tensor:
    """Return images [N, H, W, 3] cropped around their centre to the video's aspect ratio, and scaled to its size."""
    pixels = _crop_to_aspect(images[..., :3].movedim(-1, 1), shape)
    return interpolate(pixels, size=(shape.height, shape.width), mode=mode).movedim(1, -1)


def _crop_to_aspect(pixels: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """Return the largest centred part of `pixels` [N, C, H, W] with the aspect ratio of the video."""
    height, width = pixels.shape[-2:]
    aspect, wanted = width / height, shape.width / shape.height
    # ComfyUI rounds the margin, not the size; another order of operations crops one pixel more or less.
    left = round((width - width * (wanted / aspect)) / 2) if aspect > wanted else 0
    top = round((height - height * (aspect / wanted)) / 2) if aspect < wanted else 0
    return pixels[..., top : height - top, left : width - left]
