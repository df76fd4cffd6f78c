"""Condition of a clip that continues another one by its latent, filled as SVI 2.0 Pro fills it.

Source: WanImageToVideoSVIPro of KJNodes, for the LoRAs of Stable-Video-Infinity 2.0 Pro: an anchor frame, the last
latent frames of the previous clip, and the mean of the latent space for the rest; only the anchor is marked as known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...schema import FRAMES_PER_LATENT
from ...wan import WAN21, denormalise
from ..errors import ConditioningError


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuation:
    """Image condition of a clip, in ComfyUI's format."""

    image: torch.Tensor
    """`concat_latent_image`: raw [B, 16, T, h, w] float32."""
    mask: torch.Tensor
    """`concat_mask`: [1, 1, T, h, w] float32, 0 in the first frame, 1 elsewhere."""


def overlap_frames(overlap: int) -> int:
    """Return the number of frames that a clip shares with the one before: 4 overlap + 1, and 0 without an overlap.

    The repeated latent frames are the frames 1 to 4 overlap of the new clip: every latent frame but the first has 4.
    Frame 0, in the slot of the anchor, is in time the one before them.
    """
    return FRAMES_PER_LATENT * overlap + 1 if overlap else 0


def continuation(
    previous: torch.Tensor | None, *, anchor: torch.Tensor | None, overlap: int, frames: int
) -> Continuation:
    """Return the condition of a clip that continues `previous`, or that begins a video.

    Args:
        previous: raw latent of the clip before [B, 16, t, h, w]; None for the first clip, which has no overlap.
        anchor: raw latent [1 or B, 16, any, h, w] whose first frame is the anchor; None: that of `previous`.
        overlap: latent frames of `previous` that the clip repeats.
        frames: latent frames of the clip.

    Raises:
        ConditioningError: there is neither a clip nor an anchor, one of them is not a latent of Wan2.1 or Wan2.2 A14B,
            they differ in size, the clip before is shorter than the overlap, or the new one too short for it.
    """
    given = {"previous": previous, "anchor": anchor}
    latents = {name: _checked(name, latent) for name, latent in given.items() if latent is not None}
    if not latents:
        raise ConditioningError(
            "there is nothing to continue and no start image: connect the latent of the previous clip, or the prompts "
            "of WanStream Image to Video, or an anchor"
        )
    _check_same_size(latents)
    first = latents.get("anchor", latents.get("previous"))
    assert first is not None
    parts = [first[:, :, :1]]
    if previous is not None and overlap:
        _check_length(previous, overlap=overlap, frames=frames)
        parts.append(latents["previous"][:, :, -overlap:])
    batch = max(map(len, parts))
    image = denormalise(torch.zeros(batch, WAN21.channels, frames, *first.shape[3:]))
    start = 0
    for part in parts:
        image[:, :, start : start + part.shape[2]] = part
        start += part.shape[2]
    mask = torch.ones(1, 1, frames, *first.shape[3:])
    mask[:, :, 0] = 0
    return Continuation(image=image, mask=mask)


def _checked(name: str, latent: torch.Tensor) -> torch.Tensor:
    shape = list(latent.shape)
    if latent.ndim != 5 or shape[1] != WAN21.channels or 0 in shape:
        raise ConditioningError(
            f"the {name} latent is {shape}, a clip is continued with I2V experts of {WAN21.models}, which read "
            f"[B, {WAN21.channels}, T, h, w]: give a latent of one of these models"
        )
    return latent.float().cpu()


def _check_same_size(latents: dict[str, torch.Tensor]) -> None:
    sizes = {name: (latent.shape[3:], len(latent)) for name, latent in latents.items()}
    if len(sizes) < 2:
        return
    (size, videos), (anchor_size, anchors) = sizes["previous"], sizes["anchor"]
    if size != anchor_size:
        texts = [f"{width * WAN21.pixels} x {height * WAN21.pixels}" for height, width in (size, anchor_size)]
        raise ConditioningError(
            f"the previous clip has {texts[0]} pixels, the anchor or start image {texts[1]}: give both the same width "
            "and height"
        )
    if anchors not in (1, videos):
        raise ConditioningError(f"{anchors} anchors for {videos} videos: give 1 or {videos}")


def _check_length(previous: torch.Tensor, *, overlap: int, frames: int) -> None:
    if overlap > previous.shape[2]:
        raise ConditioningError(
            f"the overlap is {overlap} latent frames, and the previous clip has {previous.shape[2]}: lower the overlap "
            f"to {previous.shape[2]} or less"
        )
    if overlap + 1 > frames:
        raise ConditioningError(
            f"the anchor and an overlap of {overlap} take {overlap + 1} latent frames, and the clip has {frames}: "
            f"lower the overlap to {frames - 1} or less, or give the clip {FRAMES_PER_LATENT * overlap + 1} frames or "
            "more"
        )
