"""Condition for a clip that continues the latent of another one, filled as in SVI 2.0 Pro.

Source: WanImageToVideoSVIPro in KJNodes, for the LoRAs of Stable-Video-Infinity 2.0 Pro: an anchor
frame, the previous clip's last latent frames, and the mean of the latent space for the rest. Only
the anchor is marked as known.
"""

from __future__ import annotations

import torch

from ...shapes import FRAMES_PER_LATENT
from ...wan.latents import WAN21, denormalise
from ..steps.errors import ConditioningError
from .conditioning_keys import IMAGE_KEY, MASK_KEY


def overlap_frames(overlap: int) -> int:
    """Return the number of frames that a clip shares with the previous one.

    It is 4 overlap + 1, and 0 without an overlap. The repeated latent frames are frames 1 to 4
    overlap in the new clip, as every latent frame but the first has 4. Frame 0, in the anchor's
    slot, is the one before them in time.
    """
    if overlap == 0:
        return 0
    return FRAMES_PER_LATENT * overlap + 1


def continuation(
    previous: torch.Tensor | None, *, anchor: torch.Tensor | None, overlap: int, frames: int
) -> dict[str, torch.Tensor]:
    """Return values for both prompts, for a clip that continues `previous` or begins a video.

    `concat_latent_image` is a raw latent [B, 16, T, h, w] float32. `concat_mask` [1, 1, T, h, w] is
    0 in the first frame.

    Args:
        previous: raw latent of the previous clip [B, 16, t, h, w]. None for the first clip, which
            has no overlap.
        anchor: raw latent [1 or B, 16, any, h, w] whose first frame is the anchor. None: the first
            frame of `previous`.
        overlap: latent frames of `previous` to repeat.
        frames: latent frames in the clip.

    Raises:
        ConditioningError: there is neither a clip nor an anchor, one of them is not a Wan2.1 or
            Wan2.2 A14B latent, they differ in size, the previous clip is shorter than the overlap,
            or the new one is too short for it.
    """
    if previous is not None:
        previous = _checked("previous", previous)
    if anchor is not None:
        anchor = _checked("anchor", anchor)
    first = previous if anchor is None else anchor
    if first is None:
        raise ConditioningError(
            "there is nothing to continue and no start image: connect the latent of the previous "
            "clip, or the prompts of WanStream Image to Video, or an anchor"
        )
    if previous is not None and anchor is not None:
        _check_same_size(previous, anchor)
    parts = [first[:, :, :1]]
    # Not for an overlap of 0, because `-0:` selects all frames.
    if previous is not None and overlap:
        _check_length(previous, overlap=overlap, frames=frames)
        parts.append(previous[:, :, -overlap:])
    batch = max(map(len, parts))
    image = denormalise(torch.zeros(batch, WAN21.channels, frames, *first.shape[3:]))
    start = 0
    for part in parts:
        image[:, :, start : start + part.shape[2]] = part
        start += part.shape[2]
    mask = torch.ones(1, 1, frames, *first.shape[3:])
    mask[:, :, 0] = 0
    return {IMAGE_KEY: image, MASK_KEY: mask}


def _checked(name: str, latent: torch.Tensor) -> torch.Tensor:
    shape = list(latent.shape)
    if latent.ndim != 5 or shape[1] != WAN21.channels or 0 in shape:
        raise ConditioningError(
            f"the {name} latent is {shape}, a clip is continued with I2V experts of "
            f"{WAN21.models}, which read [B, {WAN21.channels}, T, h, w]: give a latent of one of "
            "these models"
        )
    return latent.float().cpu()


def _check_same_size(previous: torch.Tensor, anchor: torch.Tensor) -> None:
    if previous.shape[3:] != anchor.shape[3:]:
        texts = [
            f"{latent.shape[4] * WAN21.pixels} x {latent.shape[3] * WAN21.pixels}"
            for latent in (previous, anchor)
        ]
        raise ConditioningError(
            f"the previous clip has {texts[0]} pixels, the anchor or start image {texts[1]}: give "
            "both the same width and height"
        )
    videos = len(previous)
    if len(anchor) not in (1, videos):
        raise ConditioningError(f"{len(anchor)} anchors for {videos} videos: give 1 or {videos}")


def _check_length(previous: torch.Tensor, *, overlap: int, frames: int) -> None:
    if overlap > previous.shape[2]:
        raise ConditioningError(
            f"the overlap is {overlap} latent frames, and the previous clip has "
            f"{previous.shape[2]}: lower the overlap to {previous.shape[2]} or less"
        )
    if overlap + 1 > frames:
        raise ConditioningError(
            f"the anchor and an overlap of {overlap} take {overlap + 1} latent frames, and the "
            f"clip has {frames}: lower the overlap to {frames - 1} or less, or give the clip "
            f"{overlap_frames(overlap)} frames or more"
        )
