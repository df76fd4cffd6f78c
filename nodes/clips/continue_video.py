"""Node that continues a clip from its latent, without decoding and encoding again."""

from __future__ import annotations

from typing import Any

import torch

from ...host import Files, current_host, io, search_aliases
from ...sampling.inputs import continuation, leftover_sigma
from ...shapes import FRAMES_PER_LATENT
from ..inputs import limits
from ..latents import MAX_SIZE, Conditioning, condition_outputs, conditioned
from ..runs.clip_join import MAX_OVERLAP
from ..runs.file_checks import NONE
from .latent_files import check_latent_name, latent_stamp, load_latent, saved_latent_input


class ContinuationError(ValueError):
    """The inputs to Wan Continue Video contradict each other."""


def previous_latent(
    files: Files, previous: dict[str, Any] | None, file: str
) -> torch.Tensor | None:
    """Return the previous clip's raw samples, or None for the first clip in a video.

    Raises ContinuationError for two latents or one with leftover noise, and the errors of
    `load_latent`.
    """
    if previous is not None and file != NONE:
        raise ContinuationError(
            f"both a latent and the file {file} are given: disconnect previous, or set "
            f"previous_file to {NONE}"
        )
    latent = previous if file == NONE else load_latent(files, file)
    return None if latent is None else _finished("previous clip", latent)


def _finished(name: str, latent: dict[str, Any]) -> torch.Tensor:
    """Return the samples in a LATENT. Raises ContinuationError if it has leftover noise."""
    sigma = leftover_sigma(latent)
    if sigma:
        raise ContinuationError(
            f"the {name} still has noise (level {sigma:.3f}): continue from the latent of its last "
            "step"
        )
    samples: torch.Tensor = latent["samples"]
    return samples


def start_image(conditioning: Conditioning) -> torch.Tensor | None:
    """Return the raw start image latent in a conditioning, if any."""
    # ComfyUI's key for the encoded image in image-to-video conditioning.
    return conditioning[0][1].get("concat_latent_image") if conditioning else None


def check_prompts(positive: Conditioning, negative: Conditioning) -> None:
    """Raise ContinuationError for prompts with known frames after the first latent frame.

    These frames would be dropped.
    """
    for name, side in (("positive", positive), ("negative", negative)):
        for _, values in side:
            # ComfyUI's key. The image-to-video nodes make masks with 5 dimensions.
            mask = values.get("concat_mask")
            if mask is None or mask.ndim != 5:  # replaced in any case
                continue
            # The mask is [B, C, T, h, w], 0 where a frame is known.
            known = (mask[:, :, 1:] < 1).flatten(3).any(3).any(0).any(0).nonzero().flatten()
            if len(known):
                raise ContinuationError(
                    f"{name} has an end image or several start images ({len(known)} known latent "
                    f"frames after the first, the first one is {int(known[0]) + 1}), and a "
                    "continued clip has one anchor: give WanStream Image to Video one start image "
                    "and no end image"
                )


class WanStreamContinueVideo(io.ComfyNode):
    """Conditioning for a clip that continues another one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamContinueVideo",
            display_name="Wan Continue Video",
            category="WanStream/video",
            **search_aliases("svi, long video, extend video, last frame, infinite"),
            description="Continues a clip from its latent, as SVI 2.0 Pro does, without decoding "
            "it. Needs I2V experts of Wan2.2 A14B, and the LoRAs of SVI 2.0 Pro for a clean "
            "continuation.",
            inputs=[
                io.Conditioning.Input(
                    "positive",
                    tooltip="From Wan Text Encode, or from an image-to-video node, whose image is "
                    "the anchor.",
                ),
                io.Conditioning.Input(
                    "negative", tooltip="Like positive; gets the same condition."
                ),
                io.Int.Input(
                    "frames",
                    default=81,
                    **limits(1, MAX_SIZE["frames"], step=FRAMES_PER_LATENT),
                    tooltip="4n + 1, for this clip alone. Memory and time of a step are those of "
                    "one clip, however long the video becomes.",
                ),
                io.Int.Input(
                    "overlap",
                    default=1,
                    **limits(0, MAX_OVERLAP),
                    tooltip="Latent frames at the end of the previous clip that this clip repeats "
                    "after the anchor, 4 frames each. SVI uses 1. Give Wan Join Clips the same "
                    "number.",
                ),
                io.Latent.Input(
                    "previous",
                    optional=True,
                    tooltip="Latent of the clip before, from Wan Sampler. Without it and without a "
                    "file, this is the first clip of a video.",
                ),
                saved_latent_input(
                    current_host().files,
                    "previous_file",
                    "Saved latent of the clip before, instead of previous. A batch sets it for "
                    "rows with continues.",
                    optional=True,
                ),
                io.Latent.Input(
                    "anchor",
                    optional=True,
                    tooltip="Its first frame is the anchor, which keeps the video from drifting. "
                    "Default: the image of the prompts, without one the first frame of the "
                    "previous clip.",
                ),
            ],
            outputs=condition_outputs(),
        )

    @classmethod
    def validate_inputs(
        cls, frames: int | None = None, overlap: int | None = None, previous_file: str | None = NONE
    ) -> bool:
        check_clip(frames, overlap)
        check_latent_name(current_host().files, previous_file)
        return True

    @classmethod
    def fingerprint_inputs(cls, previous_file: str | None = NONE, **_: object) -> object:
        return latent_stamp(current_host().files, previous_file)

    @classmethod
    def execute(
        cls,
        positive: Conditioning,
        negative: Conditioning,
        frames: int,
        overlap: int,
        previous: dict[str, Any] | None = None,
        previous_file: str = NONE,
        anchor: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        host = current_host()
        # Again, because linked numbers are unknown before.
        check_clip(frames, overlap)
        check_prompts(positive, negative)
        values = continuation(
            previous_latent(host.files, previous, previous_file),
            anchor=start_image(positive) if anchor is None else _finished("anchor", anchor),
            overlap=overlap,
            frames=(frames - 1) // FRAMES_PER_LATENT + 1,
        )
        # The batch size follows from the previous clip and the anchor.
        empty = {"samples": torch.zeros_like(values["concat_latent_image"])}
        return conditioned(host, positive, negative, values, empty)


def check_clip(frames: int | None, overlap: int | None) -> None:
    """Raise ContinuationError for impossible numbers. A linked number is None."""
    if frames is not None and (frames < 1 or frames % FRAMES_PER_LATENT != 1):
        nearest = max(frames // FRAMES_PER_LATENT, 0) * FRAMES_PER_LATENT + 1
        raise ContinuationError(
            f"frames is {frames}, it must be a multiple of 4 plus 1: use {nearest}"
        )
    if overlap is not None and overlap < 0:
        raise ContinuationError(
            f"overlap is {overlap}: use 1, or 0 for a clip that repeats nothing"
        )
    if frames is None or overlap is None:
        return
    needed = FRAMES_PER_LATENT * overlap + 1
    if needed > frames:
        raise ContinuationError(
            f"the anchor and an overlap of {overlap} latent frames need {needed} frames, and the "
            f"clip has {frames}: lower overlap, or raise frames"
        )
