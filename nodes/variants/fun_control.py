"""Node for the inputs of Fun Control: a control video, a start image and a reference image."""

from __future__ import annotations

from pathlib import Path

import torch

from ...host import io, search_aliases
from ...sampling import (
    IMAGE_EMBEDDING_KEY,
    IMAGE_KEY,
    MASK_INDEX_KEY,
    MASK_KEY,
    REFERENCE_KEY,
    control_latents,
    control_mask,
    fitted_video,
)
from ...schema import VideoShape
from ...wan import WAN21, LatentSpace
from ..decode import vae_input
from ..latents import (
    SIZE_INPUTS,
    Conditioning,
    SizedNode,
    UnsupportedImageError,
    check_video_ram,
    clip_vision_input,
    condition_outputs,
    conditioned,
    empty_latent,
    image_embedding,
    prompt_inputs,
    vae_of,
    video_shape,
)
from ..runs.decode import encode_here
from ..runs.file_checks import NONE, check_clip_vision, check_encoder

WAN22_CONTROL, WAN21_CONTROL = "Wan2.2 Fun Control", "Wan2.1 Fun Control"


class WanStreamFunControl(SizedNode):
    """Control video, start image and reference image of Fun Control, in the format of ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamFunControl",
            display_name="WanStream Fun Control",
            category="WanStream/video",
            **search_aliases("fun control", "controlnet", "pose", "depth", "canny", "video to video"),
            description="Encodes a control video (pose, depth, edges), an optional start image and an optional "
            "reference image, and adds them to both prompts. Needs the experts of Fun Control.",
            inputs=[
                *prompt_inputs(),
                vae_input(),
                io.Image.Input(
                    "control_video",
                    tooltip="Frames of poses, depths or edges, which the video follows. Cropped around the centre and "
                    "scaled. Frames beyond the video are not used; after a shorter one the model is free.",
                ),
                *SIZE_INPUTS,
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="The first frame; several images are the first frames in order. Costs one more pass of the "
                    "VAE.",
                ),
                io.Image.Input(
                    "reference_image",
                    optional=True,
                    tooltip="A picture of the look, of which the first image is used. Its tokens are those of one more "
                    "latent frame: 5 % more compute for 81 frames. Read by Wan2.2, and by Wan2.1 from v1.1 on.",
                ),
                io.Combo.Input(
                    "model",
                    options=[WAN22_CONTROL, WAN21_CONTROL],
                    default=WAN22_CONTROL,
                    optional=True,
                    tooltip="Model of the experts: Wan2.2 has a mask between control video and start image, Wan2.1 has "
                    "none and needs clip_vision. Costs nothing.",
                ),
                clip_vision_input(
                    "For Wan2.1: clip_vision_h.safetensors, or the diffusers pipeline folder with the image "
                    "encoder. It reads the start image, without one the reference image. Its layers are streamed (0.2 "
                    "GB of device memory, 1.3 GB read)."
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
        control_video: torch.Tensor,
        batch_size: int,
        start_image: torch.Tensor | None = None,
        reference_image: torch.Tensor | None = None,
        model: str = WAN22_CONTROL,
        clip_vision: str = NONE,
        **size: int,
    ) -> io.NodeOutput:
        path, space = vae_of(vae)
        shape = video_shape(space, **size)
        values = _control_values(path, space, shape, control_video, start_image, masked=model == WAN22_CONTROL)
        if reference_image is not None:
            values[REFERENCE_KEY] = [encode_here(path, fitted_video(reference_image[:1], shape))]
        if model == WAN21_CONTROL:
            values[IMAGE_EMBEDDING_KEY] = _image_embedding(start_image, reference_image, clip_vision)
        reports = check_encoder(vae), check_clip_vision(clip_vision if model == WAN21_CONTROL else NONE)
        return conditioned(positive, negative, values, empty_latent(space, shape, batch_size), *reports)


def _control_values(
    vae: Path,
    space: LatentSpace,
    shape: VideoShape,
    control_video: torch.Tensor,
    start_image: torch.Tensor | None,
    *,
    masked: bool,
) -> dict[str, object]:
    """Return the values of both prompts for the control video and the start image."""
    if not masked and space != WAN21:
        raise UnsupportedImageError(
            f"model is {WAN21_CONTROL} with the VAE of Wan2.2 5B: choose wan_2.1_vae, or {WAN22_CONTROL} for Fun 5B"
        )
    check_video_ram(shape, "the control video")
    control = encode_here(vae, fitted_video(control_video, shape))
    start = None if start_image is None else encode_here(vae, fitted_video(start_image, shape))
    values: dict[str, object] = {IMAGE_KEY: control_latents(control, start, shape, space)}
    if masked:
        given = 0 if start_image is None else min(len(start_image), shape.frames)
        values |= {MASK_KEY: control_mask(given, shape), MASK_INDEX_KEY: space.channels}
    return values


def _image_embedding(start: torch.Tensor | None, reference: torch.Tensor | None, clip_vision: str) -> object:
    """Return the CLIP embedding of the start image, or of the reference image."""
    image = reference if start is None else start
    if image is None or clip_vision == NONE:
        raise UnsupportedImageError(
            f"{WAN21_CONTROL} reads an image through CLIP: choose a clip_vision file, and connect start_image or "
            "reference_image"
        )
    return image_embedding(image, clip_vision)
