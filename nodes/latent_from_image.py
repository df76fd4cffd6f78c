"""What a run from an image starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..host import host, io, search_words
from ..plan.shapes import FP32_BYTES, VideoShape
from ..sampling.conditioning_keys import IMAGE_SEEN
from ..sampling.first_frame import begun_latent, framed_video, start_end_mask, start_frames, start_mask
from ..wan.image_encoder import open_image_encoder
from ..wan.latent_space import WAN21
from ..wan.vae import open_vae
from .decode_inputs import vae_input
from .decode_run import encode_here
from .expert_inputs import said_once
from .latent import check_tensor_ram, empty_latent, size_inputs, size_refusal, video_shape

Conditioning = list[list[Any]]
"""ComfyUI's: pairs of an embedding [1, L, 4096] and a dictionary of what belongs to it."""

NONE = "none"
CROPS = {"none": False, "center": True}


class GivenImageError(ValueError):
    """Something beside the start image was given to a model that takes nothing else; the message names it."""


class WanStreamImageToVideo(io.ComfyNode):
    """The first and last frames of an image-to-video run, in the form of ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamImageToVideo",
            display_name="WanStream Image to Video",
            category="WanStream/video",
            **search_words("i2v", "img2vid", "flf2v", "first last frame", "start image", "end image"),
            description="Encodes a start image, and an end image if there is one, and hands them to the sampler with "
            "both prompts. Needs I2V experts, or Wan2.2 5B and its VAE.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="From Wan Text Encode; goes on to the sampler."),
                io.Conditioning.Input("negative", tooltip="From Wan Text Encode; goes on to the sampler."),
                vae_input(),
                io.Image.Input("image", tooltip="The first frame; several images are the first frames in order."),
                *size_inputs(),
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="The last frame; several images are the last frames in order. Costs nothing: the video is "
                    "encoded whole in any case. Not for Wan2.2 5B.",
                ),
                io.Combo.Input(
                    "clip_vision",
                    options=[NONE, *host.model_names("diffusers", "clip_vision")],
                    default=NONE,
                    optional=True,
                    tooltip="For Wan2.1 I2V: clip_vision_h.safetensors, or the diffusers pipeline folder that holds "
                    "the image encoder. Its layers are streamed (0.2 GB of device memory, 1.3 GB read). Wan2.2 needs "
                    "none.",
                ),
                io.Combo.Input(
                    "clip_crop",
                    options=list(CROPS),
                    default="none",
                    optional=True,
                    tooltip="What CLIP sees of the start image. none: all of it, pressed into a square, as in Wan's "
                    "own code. center: the square in its middle, as in diffusers. Costs nothing.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
                io.Latent.Output(display_name="latent"),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool | str:
        return said_once(size_refusal(width=width, height=height, frames=frames))

    @classmethod
    def execute(
        cls,
        positive: Conditioning,
        negative: Conditioning,
        vae: str,
        image: torch.Tensor,
        batch_size: int,
        end_image: torch.Tensor | None = None,
        clip_vision: str = NONE,
        clip_crop: str = "none",
        **size: int,
    ) -> io.NodeOutput:
        path = host.model_path(vae, "diffusers", "vae")
        space = open_vae(path).space
        shape = video_shape(space, **size)
        if space != WAN21:
            _check_one_image(end_image, clip_vision)
            return io.NodeOutput(positive, negative, _begun(path, image, shape, batch_size))
        check_tensor_ram(shape.width * shape.height * shape.frames * 3 * FP32_BYTES, "the video with the start image")
        video = framed_video(image, end_image, shape)
        known = len(image)
        mask = start_mask(known, shape) if end_image is None else start_end_mask(known, len(end_image), shape)
        given: dict[str, object] = {"concat_latent_image": encode_here(path, video), "concat_mask": mask}
        if clip_vision != NONE:
            encoder = open_image_encoder(host.model_path(clip_vision, "diffusers", "clip_vision"))
            given[IMAGE_SEEN] = encoder.encode(image[:1], device=host.device(), crop=CROPS[clip_crop])
        return io.NodeOutput(_with(positive, given), _with(negative, given), empty_latent(space, shape, batch_size))


def _begun(vae: Path, image: torch.Tensor, shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    """Of Wan2.2 5B: the latent begins with the images, and its mask says so."""
    return begun_latent(encode_here(vae, start_frames(image, shape)), shape, batch_size)


def _check_one_image(end_image: torch.Tensor | None, clip_vision: str) -> None:
    given = [
        name for name, there in (("end_image", end_image is not None), ("clip_vision", clip_vision != NONE)) if there
    ]
    if given:
        raise GivenImageError(
            f"{' and '.join(given)} given with the VAE of Wan2.2 5B, which is begun by a start image alone: "
            "take it off, or take an I2V model of Wan2.1 or Wan2.2 A14B and its VAE"
        )


def _with(conditioning: Conditioning, values: Mapping[str, object]) -> Conditioning:
    """A copy that also carries `values`: ComfyUI may hold the original in a cache."""
    return [[embedding, {**belongings, **values}] for embedding, belongings in conditioning]
