"""Node that joins decoded clips."""

from __future__ import annotations

import torch

from ...host import io, search_aliases
from ...sampling.inputs import overlap_frames
from ..inputs import limits
from ..runs.clip_join import MAX_OVERLAP, join_clips

MAX_CLIPS = 8
FROM_OVERLAP = -1
"""`shared_frames` value for the number that follows from `overlap`."""


class WanStreamJoinClips(io.ComfyNode):
    """Joiner for clips with overlapping ends."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamJoinClips",
            display_name="Wan Join Clips",
            category="WanStream/video",
            **search_aliases("long video, concatenate, crossfade, blend, extend video"),
            description="Joins decoded clips into one video and blends the frames that neighbours "
            "share.",
            inputs=[
                io.Image.Input("clip_1", tooltip="First clip, from Wan VAE Decode."),
                io.Image.Input("clip_2", tooltip="Its continuation, of the same size."),
                io.Int.Input(
                    "overlap",
                    default=1,
                    **limits(0, MAX_OVERLAP),
                    tooltip="Overlap of Wan Continue Video in latent frames: 1 is 5 shared frames, "
                    "2 are 9, 3 are 13.",
                ),
                io.Int.Input(
                    "shared_frames",
                    default=FROM_OVERLAP,
                    **limits(FROM_OVERLAP, 1024),
                    optional=True,
                    tooltip="Number of blended frames, instead of that of overlap; -1: from "
                    "overlap. For clips that Wan Continue Video did not make.",
                ),
                *(
                    io.Image.Input(
                        f"clip_{number}",
                        optional=True,
                        tooltip="Next clip. RAM holds all clips and the joined video.",
                    )
                    for number in range(3, MAX_CLIPS + 1)
                ),
            ],
            outputs=[io.Image.Output(display_name="images")],
        )

    @classmethod
    def execute(
        cls,
        clip_1: torch.Tensor,
        clip_2: torch.Tensor,
        overlap: int,
        shared_frames: int = FROM_OVERLAP,
        **others: torch.Tensor,
    ) -> io.NodeOutput:
        # Unconnected inputs leave a gap. The clips are ordered by their numbers.
        # Text order is the numbers' order, because all numbers have one digit.
        later = [others[name] for name in sorted(others)]
        shared = overlap_frames(overlap) if shared_frames == FROM_OVERLAP else shared_frames
        return io.NodeOutput(join_clips([clip_1, clip_2, *later], shared))
