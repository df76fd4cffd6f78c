"""Control videos and contexts for Fun Control and Bernini, in the form of ComfyUI's own nodes.

These are `Wan22FunControlToVideo`, `WanFunControlToVideo` and `BerniniConditioning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch.nn.functional import interpolate

from ...shapes import FP32_BYTES, FRAMES_PER_LATENT, VideoShape
from ...wan.latents import LatentSpace, denormalise
from .conditioning_keys import IMAGE_KEY, MASK_INDEX_KEY, MASK_KEY
from .extra_tokens import CONTEXT_KEY, REFERENCE_KEY
from .first_frame import Encode, fitted, start_end_mask

SIDE_STEP = 16
"""Pixel multiple for the sides of a reference: two latent pixels, or one token."""


def control_values(
    encode: Encode,
    space: LatentSpace,
    shape: VideoShape,
    *,
    control: torch.Tensor,
    start: torch.Tensor | None,
    reference: torch.Tensor | None,
    masked: bool,
) -> dict[str, object]:
    """Return values for both prompts, for Fun Control.

    Args:
        encode: VAE encoder.
        space: the VAE's latent space.
        shape: video size.
        control: control video images.
        start: start images.
        reference: reference images. Only the first is used.
        masked: the model reads a mask between the control video and the start image (Wan2.2).
    """
    # The control video comes first, then the start image. Frames after them are empty.
    joined = denormalise(torch.zeros(1, space.channels, *shape.latent)).repeat(1, 2, 1, 1, 1)
    latent = encode(fitted_video(control, shape))
    joined[:, : space.channels, : latent.shape[2]] = latent
    start_frames = 0
    if start is not None:
        latent = encode(fitted_video(start, shape))
        joined[:, space.channels :, : latent.shape[2]] = latent
        start_frames = min(len(start), shape.frames)
    values: dict[str, object] = {IMAGE_KEY: joined}
    if masked:
        mask = start_end_mask(start_frames, 0, shape)
        values |= {MASK_KEY: mask, MASK_INDEX_KEY: space.channels}
    if reference is not None:
        values[REFERENCE_KEY] = [encode(fitted_video(reference[:1], shape))]
    return values


def context_values(
    encode: Encode,
    check_ram: Callable[[int, str], None],
    shape: VideoShape,
    *,
    source: torch.Tensor | None,
    reference: torch.Tensor | None,
    images: Sequence[torch.Tensor],
    longest: int,
) -> dict[str, object]:
    """Return values for both prompts, for Bernini: source, reference video and reference images.

    Args:
        encode: VAE encoder.
        check_ram: called with the size of scaled frames and their name before they are scaled.
        shape: video size.
        source: images of the video to edit.
        reference: reference video images.
        images: batches of reference images. Each image is a separate context.
        longest: longest side of references in pixels.
    """
    # Each is encoded before the next is scaled, so that RAM holds only one of them.
    contexts = []
    if source is not None:
        taken = whole_latent_frames(source, shape.frames)
        check_ram(len(taken) * shape.height * shape.width * 3 * FP32_BYTES, "the source video")
        contexts.append(encode(fitted(taken, shape, mode="area")))
    if reference is not None:
        taken = whole_latent_frames(reference, shape.frames)
        height, width = reference_size(taken, longest)
        check_ram(len(taken) * height * width * 3 * FP32_BYTES, "the reference video")
        contexts.append(encode(fitted_reference(taken, shape.frames, longest)))
    single = chain.from_iterable(batch.split(1) for batch in images)
    contexts += [encode(fitted_reference(image, 1, longest)) for image in single]
    return {CONTEXT_KEY: contexts} if contexts else {}


def whole_latent_frames(images: torch.Tensor, frames: int) -> torch.Tensor:
    """Return the first 4n + 1 of at most `frames` images [N, H, W, C], as the VAE needs them.

    Raises:
        ValueError: these are not images.
    """
    if images.ndim != 4 or images.shape[-1] < 3 or 0 in images.shape:
        raise ValueError(f"a video or an image is {list(images.shape)}: give images [N, H, W, 3]")
    count = min(len(images), frames)
    return images[: (count - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1, ..., :3]


def fitted_video(images: torch.Tensor, shape: VideoShape) -> torch.Tensor:
    """Return frames from `images` for a video of `shape`, cropped around the centre and scaled."""
    return fitted(whole_latent_frames(images, shape.frames), shape)


def fitted_reference(images: torch.Tensor, frames: int, longest: int) -> torch.Tensor:
    """Return at most `frames` images in their aspect ratio, no side above `longest` pixels."""
    taken = whole_latent_frames(images, frames)
    return interpolate(
        taken.movedim(-1, 1), size=reference_size(taken, longest), mode="area"
    ).movedim(1, -1)


def reference_size(images: torch.Tensor, longest: int) -> tuple[int, int]:
    """Return (height, width) of fitted references.

    Smaller images are not enlarged. Both sides are rounded to multiples of 16 pixels.
    """
    height, width = images.shape[1:3]
    scale = min(longest / max(height, width), 1.0)
    height, width = (
        max(SIDE_STEP, round(side * scale / SIDE_STEP) * SIDE_STEP) for side in (height, width)
    )
    return height, width
