"""Node that continues a clip by its latent, without decoding and encoding it again."""

from __future__ import annotations

from typing import Any

import torch

from ...host import io, search_aliases
from ...sampling import continuation, leftover_sigma
from ...schema import FRAMES_PER_LATENT
from ..latents import MAX_SIZE, Conditioning, condition_outputs, conditioned
from .latent_files import NONE, check_latent_name, latent_stamp, load_latent, saved_latent_input

MAX_OVERLAP = 64


class ContinuationError(ValueError):
    """The inputs of Wan Continue Video contradict each other."""


def previous_latent(previous: dict[str, Any] | None, file: str) -> torch.Tensor | None:
    """Return the raw samples of the previous clip, None for the first clip of a video.

    Raises ContinuationError for two latents or one with leftover noise, and the errors of `load_latent`.
    """
    if previous is not None and file != NONE:
        raise ContinuationError(
            f"both a latent and the file {file} are given: disconnect previous, or set previous_file to {NONE}"
        )
    latent = previous if file == NONE else load_latent(file)
    return None if latent is None else _finished("previous clip", latent)


def _finished(name: str, latent: dict[str, Any]) -> torch.Tensor:
    """Return the samples of a LATENT. Raises ContinuationError if it has leftover noise."""
    sigma = leftover_sigma(latent)
    if sigma:
        raise ContinuationError(
            f"the {name} still has noise (level {sigma:.3f}): continue from the latent of its last step"
        )
    samples: torch.Tensor = latent["samples"]
    return samples


def start_image(conditioning: Conditioning) -> torch.Tensor | None:
    """Return the raw latent of the start image that a conditioning carries."""
    return conditioning[0][1].get("concat_latent_image") if conditioning else None


def check_prompts(positive: Conditioning, negative: Conditioning) -> None:
    """Raise ContinuationError for prompts with known frames after the first latent frame, which would be dropped."""
    for name, side in (("positive", positive), ("negative", negative)):
        for _, values in side:
            mask = values.get("concat_mask")
            if mask is None or mask.ndim != 5:  # replaced in any case
                continue
            known = (mask[:, :, 1:] < 1).flatten(3).any(3).any(0).any(0).nonzero().flatten()
            if len(known):
                raise ContinuationError(
                    f"{name} has an end image or several start images ({len(known)} known latent frames after the "
                    f"first, the first one is {int(known[0]) + 1}), and a continued clip has one anchor: give "
                    "WanStream Image to Video one start image and no end image"
                )


class WanStreamContinueVideo(io.ComfyNode):
    """Condition of a clip that continues another one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamContinueVideo",
            display_name="Wan Continue Video",
            category="WanStream/video",
            **search_aliases("svi", "long video", "extend video", "last frame", "infinite"),
            description="Continues a clip from its latent, as SVI 2.0 Pro does, without decoding it. Needs I2V "
            "experts of Wan2.2 A14B, and the LoRAs of SVI 2.0 Pro for a clean continuation.",
            inputs=[
                io.Conditioning.Input(
                    "positive",
                    tooltip="From Wan Text Encode, or from an image-to-video node, whose image is the anchor.",
                ),
                io.Conditioning.Input("negative", tooltip="Like positive; gets the same condition."),
                io.Int.Input(
                    "frames",
                    default=81,
                    min=1,
                    max=MAX_SIZE["frames"],
                    step=FRAMES_PER_LATENT,
                    tooltip="4n + 1, for this clip alone. Memory and time of a step are those of one clip, however "
                    "long the video becomes.",
                ),
                io.Int.Input(
                    "overlap",
                    default=1,
                    min=0,
                    max=MAX_OVERLAP,
                    tooltip="Latent frames at the end of the previous clip that this clip repeats after the anchor, 4 "
                    "frames each. SVI uses 1. Give Wan Join Clips the same number.",
                ),
                io.Latent.Input(
                    "previous",
                    optional=True,
                    tooltip="Latent of the clip before, from Wan Sampler. Without it and without a file, this is the "
                    "first clip of a video.",
                ),
                saved_latent_input(
                    "previous_file",
                    "Saved latent of the clip before, instead of previous. A batch sets it for rows with continues.",
                    optional=True,
                ),
                io.Latent.Input(
                    "anchor",
                    optional=True,
                    tooltip="Its first frame is the anchor, which keeps the video from drifting. Default: the image of "
                    "the prompts, without one the first frame of the previous clip.",
                ),
            ],
            outputs=condition_outputs(),
        )

    @classmethod
    def validate_inputs(
        cls, frames: int | None = None, overlap: int | None = None, previous_file: str | None = NONE
    ) -> bool:
        check_clip(frames, overlap)
        check_latent_name(previous_file)
        return True

    @classmethod
    def fingerprint_inputs(cls, previous_file: str | None = NONE, **_: object) -> object:
        return latent_stamp(previous_file)

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
        # Again: linked numbers are not known before.
        check_clip(frames, overlap)
        check_prompts(positive, negative)
        condition = continuation(
            previous_latent(previous, previous_file),
            anchor=start_image(positive) if anchor is None else _finished("anchor", anchor),
            overlap=overlap,
            frames=(frames - 1) // FRAMES_PER_LATENT + 1,
        )
        values = {"concat_latent_image": condition.image, "concat_mask": condition.mask}
        return conditioned(positive, negative, values, {"samples": torch.zeros_like(condition.image)})


def check_clip(frames: int | None, overlap: int | None) -> None:
    """Raise ContinuationError for numbers that no clip has; a linked number is None."""
    if frames is not None and (frames < 1 or frames % FRAMES_PER_LATENT != 1):
        nearest = max(frames // FRAMES_PER_LATENT, 0) * FRAMES_PER_LATENT + 1
        raise ContinuationError(f"frames is {frames}, it must be a multiple of 4 plus 1: use {nearest}")
    if overlap is not None and overlap < 0:
        raise ContinuationError(f"overlap is {overlap}: use 1, or 0 for a clip that repeats nothing")
    if frames is None or overlap is None:
        return
    needed = FRAMES_PER_LATENT * overlap + 1
    if needed > frames:
        raise ContinuationError(
            f"the anchor and an overlap of {overlap} latent frames need {needed} frames, and the clip has {frames}: "
            "lower overlap, or raise frames"
        )
