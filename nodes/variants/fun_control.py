"""Node with inputs for Fun Control: a control video, a start image and a reference image."""

from __future__ import annotations

from functools import partial

import torch

from ...host import Host, current_host, io, search_aliases
from ...sampling.inputs import IMAGE_EMBEDDING_KEY, control_values
from ...wan.latents import WAN21
from .. import latents
from ..decode import VAE_TOOLTIP
from ..runs.decode import encode_here
from ..runs.file_checks import NONE, check_clip_vision, check_encoder

WAN22_CONTROL = "Wan2.2 Fun Control"
WAN21_CONTROL = "Wan2.1 Fun Control"


class WanStreamFunControl(latents.SizedNode):
    """Control video, start and reference image for Fun Control, in ComfyUI's own node format."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamFunControl",
            display_name="WanStream Fun Control",
            category="WanStream/video",
            **search_aliases("fun control, controlnet, pose, depth, canny, video to video"),
            description="Encodes a control video (pose, depth, edges), an optional start image and "
            "an optional reference image, and adds them to both prompts. Needs the experts of "
            "Fun Control.",
            inputs=[
                *latents.prompt_inputs(),
                cls.file_input("vae", tooltip=VAE_TOOLTIP),
                io.Image.Input(
                    "control_video",
                    tooltip="Frames of poses, depths or edges, which the video follows. Cropped "
                    "around the centre and scaled. Frames beyond the video are not used; after "
                    "a shorter one the model is free.",
                ),
                *latents.SIZE_INPUTS,
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="The first frame; several images are the first frames in order. Costs "
                    "one more pass of the VAE.",
                ),
                io.Image.Input(
                    "reference_image",
                    optional=True,
                    tooltip="A picture of the look, of which the first image is used. Its tokens "
                    "are those of one more latent frame: 5 % more compute for 81 frames. Read "
                    "by Wan2.2, and by Wan2.1 from v1.1 on.",
                ),
                io.Combo.Input(
                    "model",
                    options=[WAN22_CONTROL, WAN21_CONTROL],
                    default=WAN22_CONTROL,
                    optional=True,
                    tooltip="Model of the experts: Wan2.2 has a mask between control video and "
                    "start image, Wan2.1 has none and needs clip_vision. Costs nothing.",
                ),
                cls.file_input(
                    "clip_vision",
                    no_file=NONE,
                    optional=True,
                    tooltip="For Wan2.1: clip_vision_h.safetensors, or the diffusers pipeline "
                    "folder with the image encoder. It reads the start image, without one the "
                    "reference image. Its layers are streamed (0.2 GB of device memory, 1.3 GB "
                    "read).",
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
        control_video: torch.Tensor,
        batch_size: int,
        start_image: torch.Tensor | None = None,
        reference_image: torch.Tensor | None = None,
        model: str = WAN22_CONTROL,
        clip_vision: str = NONE,
        **size: int,
    ) -> io.NodeOutput:
        host = current_host()
        path, space = latents.vae_of(host.files, vae)
        shape = latents.video_shape(space, **size)
        # Checked first: a wrong choice of model must not cost the encoding of the video.
        _check_space(model, space)
        latents.check_video_ram(shape, "the control video")
        images = {"start": start_image, "reference": reference_image}
        encode = partial(encode_here, host, path)
        values = control_values(
            encode, space, shape, masked=model == WAN22_CONTROL, control=control_video, **images
        )
        notices = check_encoder(host, vae)
        if model == WAN21_CONTROL:
            values[IMAGE_EMBEDDING_KEY] = _image_embedding(
                host, start_image, reference_image, clip_vision
            )
            notices += check_clip_vision(host, clip_vision)
        latent = latents.empty_latent(space, shape, batch_size)
        return latents.conditioned(host, positive, negative, values, latent, *notices)


def _check_space(model: str, space: object) -> None:
    if model == WAN21_CONTROL and space != WAN21:
        raise latents.UnsupportedImageError(
            f"model is {WAN21_CONTROL} with the VAE of Wan2.2 5B: choose wan_2.1_vae, or "
            f"{WAN22_CONTROL} for Fun 5B"
        )


def _image_embedding(
    host: Host, start: torch.Tensor | None, reference: torch.Tensor | None, clip_vision: str
) -> object:
    """Return the CLIP embedding of the start image, or of the reference image."""
    image = reference if start is None else start
    if image is None or clip_vision == NONE:
        raise latents.UnsupportedImageError(
            f"{WAN21_CONTROL} reads an image through CLIP: choose a clip_vision file, and connect "
            "start_image or reference_image"
        )
    return latents.image_embedding(host, image, clip_vision)
