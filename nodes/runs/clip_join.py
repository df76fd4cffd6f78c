"""Joined clips with blended shared frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...sampling.steps import check_ram

MAX_OVERLAP = 64


class JoinError(ValueError):
    """The clips do not fit together. The message has the sizes."""


def join_clips(clips: Sequence[torch.Tensor], overlap: int) -> torch.Tensor:
    """Return one video with all clips. Neighbours share `overlap` frames, blended linearly.

    In shared frame i, the later clip has weight (i + 1) / (overlap + 1). The result is allocated
    once and each clip is copied once, so RAM holds only the clips and the result.

    Args:
        clips: [F_i, H, W, C] with the same size and dtype.
        overlap: number of shared frames, less than the length of any clip.

    Returns [sum of F_i - (clips - 1) * overlap, H, W, C].

    Raises:
        JoinError: the sizes differ, or a clip is not longer than the overlap.
        InsufficientMemoryError: the result does not fit into RAM.
    """
    _check(clips, overlap)
    first = clips[0]
    total = sum(map(len, clips)) - (len(clips) - 1) * overlap
    check_ram(
        total * first[0].numel() * first.element_size(),
        subject="the joined video takes",
        remedy="join fewer clips, and put the files together with an editor",
    )
    video = first.new_empty(total, *first.shape[1:])
    video[: len(first)] = first
    end = len(first)
    for clip in clips[1:]:
        # Frame by frame: an intermediate result for all shared frames would be another copy.
        for index in range(overlap):
            # In place: a + w * (b - a), where a is the earlier clip's frame.
            video[end - overlap + index].lerp_(clip[index], (index + 1) / (overlap + 1))
        rest = len(clip) - overlap
        video[end : end + rest] = clip[overlap:]
        end += rest
    return video


def _check(clips: Sequence[torch.Tensor], overlap: int) -> None:
    for number, clip in enumerate(clips, 1):
        if clip.ndim != 4 or 0 in clip.shape:
            raise JoinError(
                f"clip {number} is {list(clip.shape)}: give images [frames, height, width, "
                "channels]"
            )
        if clip.shape[1:] != clips[0].shape[1:] or clip.dtype != clips[0].dtype:
            raise JoinError(
                f"clip {number} is {list(clip.shape)} ({clip.dtype}), clip 1 "
                f"{list(clips[0].shape)} ({clips[0].dtype}): all clips need one size; scale or "
                "crop them first"
            )
        if overlap >= len(clip):
            raise JoinError(
                f"clip {number} has {len(clip)} frames, and the clips share {overlap}: lower the "
                f"overlap to {len(clip) - 1} frames or less"
            )
