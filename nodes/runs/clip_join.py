"""Joined clips: the frames that two clips share are blended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...devices import insufficient_ram
from ...sampling import InsufficientMemoryError
from ...schema import format_need


class JoinError(ValueError):
    """The clips do not fit together; the message has the sizes."""


def join_clips(clips: Sequence[torch.Tensor], overlap: int) -> torch.Tensor:
    """Return one video of all clips, whose neighbours share `overlap` frames that are blended linearly.

    Of `overlap` shared frames, frame i has (i + 1) / (overlap + 1) of the later clip. The result is allocated once and
    each clip is copied once, so that beyond the clips nothing but the result is in RAM.

    Args:
        clips: [F_i, H, W, C] of one size and dtype.
        overlap: number of shared frames, less than any clip has.

    Returns [sum of F_i - (clips - 1) * overlap, H, W, C].

    Raises:
        JoinError: the sizes differ, or a clip is not longer than the overlap.
        InsufficientMemoryError: the result does not fit into RAM.
    """
    _check(clips, overlap)
    first = clips[0]
    total = sum(map(len, clips)) - (len(clips) - 1) * overlap
    _check_ram(total * first[0].numel() * first.element_size())
    video = first.new_empty(total, *first.shape[1:])
    video[: len(first)] = first
    end = len(first)
    for clip in clips[1:]:
        # Frame by frame: an intermediate result of all shared frames would be another copy.
        for index in range(overlap):
            video[end - overlap + index].lerp_(clip[index], (index + 1) / (overlap + 1))
        rest = len(clip) - overlap
        video[end : end + rest] = clip[overlap:]
        end += rest
    return video


def _check(clips: Sequence[torch.Tensor], overlap: int) -> None:
    for number, clip in enumerate(clips, 1):
        if clip.ndim != 4 or 0 in clip.shape:
            raise JoinError(f"clip {number} is {list(clip.shape)}: give images [frames, height, width, channels]")
        if clip.shape[1:] != clips[0].shape[1:] or clip.dtype != clips[0].dtype:
            raise JoinError(
                f"clip {number} is {list(clip.shape)} ({clip.dtype}), clip 1 {list(clips[0].shape)} "
                f"({clips[0].dtype}): all clips need one size; scale or crop them first"
            )
        if overlap >= len(clip):
            raise JoinError(
                f"clip {number} has {len(clip)} frames, and the clips share {overlap}: lower the overlap to "
                f"{len(clip) - 1} frames or less"
            )


def _check_ram(nbytes: int) -> None:
    lacking = insufficient_ram(nbytes)
    if lacking is not None:
        raise InsufficientMemoryError(
            f"the joined video takes {format_need(nbytes)} of RAM, and {format_need(lacking)} are free (swap "
            "included): join fewer clips, and put the files together with an editor"
        )
