"""Node with inputs for Bernini: a source video, a reference video and reference images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ...host import Files, current_host, io, search_aliases
from ...sampling.inputs import context_values
from ...wan.latents import WAN21
from .. import latents
from ..decode import VAE_TOOLTIP
from ..inputs import limits
from ..runs.decode import encode_here
from ..runs.file_checks import check_encoder

REFERENCES = ("reference_image", "reference_image_2", "reference_image_3", "reference_image_4")


class WanStreamBernini(latents.SizedNode):
    """Source video and references for Bernini, in the format of ComfyUI's own node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBernini",
            display_name="WanStream Bernini",
            category="WanStream/video",
            **search_aliases(
                "bernini, edit video, video to video, v2v, r2v, subject, context latents"
            ),
            description="Encodes a source video, a reference video and reference images, and adds "
            "them to both prompts. Needs the experts of Bernini-R; the connected inputs "
            "determine the task.",
            inputs=[
                *latents.prompt_inputs(),
                cls.file_input("vae", tooltip=VAE_TOOLTIP),
                *latents.SIZE_INPUTS,
                io.Image.Input(
                    "source_video",
                    optional=True,
                    tooltip="The video to edit. Cropped around the centre and scaled to the size "
                    "of the video. Doubles the tokens, and attention takes four times as long.",
                ),
                io.Image.Input(
                    "reference_video",
                    optional=True,
                    tooltip="A video with what is to appear in the source. Keeps its aspect ratio; "
                    "every latent frame adds its tokens.",
                ),
                *(
                    io.Image.Input(
                        name,
                        optional=True,
                        tooltip="A picture of a person, a thing or a look. Keeps its aspect ratio, "
                        "and adds the tokens of one latent frame: 5 % for 81 frames. Several "
                        "images are references of their own.",
                    )
                    for name in REFERENCES
                ),
                io.Int.Input(
                    "longest_side",
                    default=848,
                    **limits(16, 4096, step=16),
                    optional=True,
                    tooltip="Longest side of references in pixels; larger ones are scaled down. A "
                    "smaller one has fewer tokens, and so costs less in every step.",
                ),
            ],
            outputs=latents.condition_outputs(),
        )

    @classmethod
    def execute(  # noqa: PLR0913, PLR0917 (the inputs of the node)
        cls,
        positive: latents.Conditioning,
        negative: latents.Conditioning,
        vae: str,
        width: int,
        height: int,
        frames: int,
        batch_size: int,
        source_video: torch.Tensor | None = None,
        reference_video: torch.Tensor | None = None,
        longest_side: int = 848,
        **references: torch.Tensor,
    ) -> io.NodeOutput:
        host = current_host()
        shape = latents.video_shape(WAN21, width=width, height=height, frames=frames)
        encode = partial(encode_here, host, _vae(host.files, vae))
        # In the order of the sockets, because keyword arguments come in workflow order.
        images = [references[name] for name in REFERENCES if references.get(name) is not None]
        videos = {"source": source_video, "reference": reference_video}
        values = context_values(
            encode, latents.check_tensor_ram, shape, images=images, longest=longest_side, **videos
        )
        latent = latents.empty_latent(WAN21, shape, batch_size)
        return latents.conditioned(
            host, positive, negative, values, latent, *check_encoder(host, vae)
        )


def _vae(files: Files, name: str) -> Path:
    path, space = latents.vae_of(files, name)
    if space != WAN21:
        raise latents.UnsupportedImageError(
            f"{name} is the VAE of Wan2.2 5B, and Bernini takes latents of wan_2.1_vae: choose it"
        )
    return path
