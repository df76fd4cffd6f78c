"""What a run starts from: an empty latent, or an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..host import host, io
from ..plan.shapes import VideoShape
from ..sampling.conditioning import IMAGE_SEEN
from ..sampling.first_frame import framed_video, start_end_mask, start_mask
from ..wan.image_encoder import open_image_encoder
from .decode_run import encode_here

Conditioning = list[list[Any]]
"""ComfyUI's: pairs of an embedding [1, L, 4096] and a dictionary of what belongs to it."""


NONE = "none"
CROPS = {"none": False, "center": True}
LARGEST = {"width": 4096, "height": 4096, "frames": 1025}


def _size_inputs() -> list[io.Input]:
    return [
        io.Int.Input(
            "width",
            default=832,
            min=16,
            max=LARGEST["width"],
            step=16,
            tooltip="Multiple of 16. A step costs more than in proportion to width x height x frames: 1280x720 takes "
            "about four times as long per block as 832x480.",
        ),
        io.Int.Input(
            "height", default=480, min=16, max=LARGEST["height"], step=16, tooltip="Multiple of 16; see width."
        ),
        io.Int.Input(
            "frames",
            default=81,
            min=1,
            max=LARGEST["frames"],
            step=4,
            tooltip="4n + 1. 81 are 5 seconds at 16 fps, what Wan2.2 was trained on; every 4 more cost one latent "
            "frame.",
        ),
        io.Int.Input(
            "batch_size",
            default=1,
            min=1,
            max=64,
            tooltip="Videos made together. Each costs its full compute time, but weights are fetched once for all of "
            "them.",
        ),
    ]


def _video_shape(**size: int) -> VideoShape:
    """The shape of a video of that width, height and number of frames; raises ValueError if it cannot be made."""
    for name, value in size.items():
        if value > LARGEST[name]:
            raise ValueError(f"{name} is {value}: use {LARGEST[name]} or less")
    return VideoShape(**size)


def _size_refusal(**size: object) -> bool | str:
    """For `validate_inputs`: why such a video cannot be made, told before anything runs; True if it can.

    What is no number is left to others: a link is None here and known only at the run, and text is refused by the host.
    """
    known = {name: value for name, value in size.items() if isinstance(value, int)}
    try:
        if len(known) == len(size):
            _video_shape(**known)
    except ValueError as err:
        return str(err)
    return True


def _empty(shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    return {"samples": torch.zeros(batch_size, 16, *shape.latent)}


class WanStreamEmptyLatent(io.ComfyNode):
    """The size of a text-to-video run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamEmptyLatent",
            display_name="Wan Empty Latent",
            category="WanStream",
            description="An empty latent of the right size for a video made from text alone.",
            inputs=_size_inputs(),
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool | str:
        return _size_refusal(width=width, height=height, frames=frames)

    @classmethod
    def execute(cls, width: int, height: int, frames: int, batch_size: int) -> io.NodeOutput:
        return io.NodeOutput(_empty(_video_shape(width=width, height=height, frames=frames), batch_size))


class WanStreamImageToVideo(io.ComfyNode):
    """The first and last frames of an image-to-video run, in the form of ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamImageToVideo",
            display_name="Wan Image to Video",
            category="WanStream",
            description="Encodes a start image, and an end image if there is one, and hands them to the sampler with "
            "both prompts. Needs I2V experts.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="From Wan Text Encode; goes on to the sampler."),
                io.Conditioning.Input("negative", tooltip="From Wan Text Encode; goes on to the sampler."),
                io.Combo.Input(
                    "vae",
                    options=host.model_names("diffusers", "vae"),
                    tooltip="wan_2.1_vae.safetensors, or the diffusers pipeline folder that holds the VAE. It is "
                    "loaded for this node alone (0.5 GB).",
                ),
                io.Image.Input("image", tooltip="The first frame; several images are the first frames in order."),
                *_size_inputs(),
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="The last frame; several images are the last frames in order. Costs nothing: the video is "
                    "encoded whole in any case.",
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
        return _size_refusal(width=width, height=height, frames=frames)

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
        shape = _video_shape(**size)
        video = framed_video(image, end_image, shape)
        known = len(image)
        mask = start_mask(known, shape) if end_image is None else start_end_mask(known, len(end_image), shape)
        encoded = encode_here(host.model_path(vae, "diffusers", "vae"), video)
        given: dict[str, object] = {"concat_latent_image": encoded, "concat_mask": mask}
        if clip_vision != NONE:
            encoder = open_image_encoder(host.model_path(clip_vision, "diffusers", "clip_vision"))
            given[IMAGE_SEEN] = encoder.encode(image[:1], device=host.device(), crop=CROPS[clip_crop])
        return io.NodeOutput(_with(positive, given), _with(negative, given), _empty(shape, batch_size))


def _with(conditioning: Conditioning, values: Mapping[str, object]) -> Conditioning:
    """A copy that also carries `values`: ComfyUI may hold the original in a cache."""
    return [[embedding, {**belongings, **values}] for embedding, belongings in conditioning]
