"""Node for the inputs of Bernini: a source video, a reference video and reference images."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from ...host import io, search_aliases
from ...sampling import (
    CONTEXT_KEY,
    fitted_reference,
    fitted_video,
    reference_size,
    reference_streams,
    whole_latent_frames,
)
from ...schema import FP32_BYTES, VideoShape
from ...wan import WAN21
from ..decode import vae_input
from ..latents import (
    SIZE_INPUTS,
    Conditioning,
    SizedNode,
    UnsupportedImageError,
    check_tensor_ram,
    condition_outputs,
    conditioned,
    empty_latent,
    prompt_inputs,
    vae_of,
    video_shape,
)
from ..runs.decode import encode_here
from ..runs.file_checks import check_encoder

REFERENCES = ("reference_image", "reference_image_2", "reference_image_3", "reference_image_4")


class WanStreamBernini(SizedNode):
    """Source video and references of Bernini, in the format of ComfyUI's own node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBernini",
            display_name="WanStream Bernini",
            category="WanStream/video",
            **search_aliases("bernini", "edit video", "video to video", "v2v", "r2v", "subject", "context latents"),
            description="Encodes a source video, a reference video and reference images, and adds them to both "
            "prompts. Needs the experts of Bernini-R; the connected inputs determine the task.",
            inputs=[
                *prompt_inputs(),
                vae_input(),
                *SIZE_INPUTS,
                io.Image.Input(
                    "source_video",
                    optional=True,
                    tooltip="The video to edit. Cropped around the centre and scaled to the size of the video. Doubles "
                    "the tokens, and attention takes four times as long.",
                ),
                io.Image.Input(
                    "reference_video",
                    optional=True,
                    tooltip="A video with what is to appear in the source. Keeps its aspect ratio; every latent frame "
                    "adds its tokens.",
                ),
                *(
                    io.Image.Input(
                        name,
                        optional=True,
                        tooltip="A picture of a person, a thing or a look. Keeps its aspect ratio, and adds the tokens "
                        "of one latent frame: 5 % for 81 frames. Several images are references of their own.",
                    )
                    for name in REFERENCES
                ),
                io.Int.Input(
                    "longest_side",
                    default=848,
                    min=16,
                    max=4096,
                    step=16,
                    optional=True,
                    tooltip="Longest side of references in pixels; larger ones are scaled down. A smaller one has "
                    "fewer tokens, and so costs less in every step.",
                ),
            ],
            outputs=condition_outputs(),
        )

    @classmethod
    def execute(  # noqa: PLR0913, PLR0917 (the inputs of the node)
        cls,
        positive: Conditioning,
        negative: Conditioning,
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
        path, shape = _vae(vae), video_shape(WAN21, width=width, height=height, frames=frames)
        images = [references[name] for name in REFERENCES if references.get(name) is not None]
        context = _contexts(path, shape, source_video, reference_video, images, longest_side)
        values: dict[str, object] = {CONTEXT_KEY: context} if context else {}
        return conditioned(positive, negative, values, empty_latent(WAN21, shape, batch_size), check_encoder(vae))


def _vae(name: str) -> Path:
    path, space = vae_of(name)
    if space != WAN21:
        raise UnsupportedImageError(
            f"{name} is the VAE of Wan2.2 5B, and Bernini takes latents of wan_2.1_vae: choose it"
        )
    return path


def _contexts(
    vae: Path,
    shape: VideoShape,
    source: torch.Tensor | None,
    reference: torch.Tensor | None,
    images: list[torch.Tensor],
    longest: int,
) -> list[torch.Tensor]:
    """Return the raw latents of the source, the reference video and each reference image, in this order.

    Raises:
        InsufficientMemoryError: the scaled frames of a video do not fit into RAM.
    """
    # Each is encoded before the next is scaled, so that only one of them is in RAM.
    contexts = []
    if source is not None:
        _check_ram(whole_latent_frames(source, shape.frames), (shape.height, shape.width), "the source video")
        contexts.append(encode_here(vae, fitted_video(source, shape, mode="area")))
    if reference is not None:
        taken = whole_latent_frames(reference, shape.frames)
        _check_ram(taken, reference_size(taken, longest), "the reference video")
        contexts.append(encode_here(vae, fitted_reference(taken, shape.frames, longest)))
    return contexts + [encode_here(vae, fitted_reference(image, 1, longest)) for image in reference_streams(images)]


def _check_ram(taken: torch.Tensor, size: tuple[int, int], name: str) -> None:
    """Raise InsufficientMemoryError if the images, scaled to `size`, do not fit into RAM."""
    check_tensor_ram(len(taken) * prod(size) * 3 * FP32_BYTES, name)
