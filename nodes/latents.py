"""Nodes that create the latent for a run: empty, or from images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..host import Files, Host, current_host, io, search_aliases
from ..sampling.inputs import IMAGE_EMBEDDING_KEY, latent_with_first_frames, start_image_values
from ..sampling.steps import check_ram
from ..schema.records import Notice
from ..shapes import FP32_BYTES, VideoShape
from ..wan import open_image_encoder
from ..wan.latents import SPACES, WAN21, LatentSpace
from ..wan.vae import open_vae
from .decode import VAE_TOOLTIP
from .inputs import known, limits
from .runs.decode import encode_here
from .runs.file_checks import CLIP_FOLDERS, ENCODER_FOLDERS, NONE, check_clip_vision, check_encoder
from .runs.file_node import FileNode
from .runs.notices import noticed

MODELS = {space.models: space for space in SPACES}
MAX_SIZE = {"width": 4096, "height": 4096, "frames": 1025}

SIZE_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "width",
        default=832,
        **limits(16, MAX_SIZE["width"], step=16),
        tooltip="Multiple of 16, for Wan2.2 5B of 32. The time of a step grows faster than width x "
        "height x frames: 1280x720 takes about four times as long per block as 832x480.",
    ),
    io.Int.Input(
        "height",
        default=480,
        **limits(16, MAX_SIZE["height"], step=16),
        tooltip="Multiple of 16 or 32; see width.",
    ),
    io.Int.Input(
        "frames",
        default=81,
        **limits(1, MAX_SIZE["frames"], step=4),
        tooltip="4n + 1. 81 frames are 5 seconds at 16 fps, the format of Wan2.2 A14B; 5B uses 121 "
        "frames at 24 fps. Every 4 more add one latent frame.",
    ),
    io.Int.Input(
        "batch_size",
        default=1,
        **limits(1, 64),
        tooltip="Videos made together. Each costs its full compute time, but weights are fetched "
        "once for all of them.",
    ),
)
"""Inputs for video size and number of videos."""


def video_shape(space: LatentSpace, **size: int) -> VideoShape:
    """Return a video shape.

    Raises ValueError for an impossible width, height or number of frames.
    """
    # ComfyUI checks no range for inputs that `validate_inputs` receives.
    for name, value in size.items():
        if value > MAX_SIZE[name]:
            raise ValueError(f"{name} is {value}: use {MAX_SIZE[name]} or less")
    return VideoShape(**size, per_latent=space.pixels)


def check_size(space: LatentSpace = WAN21, **size: object) -> None:
    """Raise ValueError for an impossible video size, in `validate_inputs`, before nodes run."""
    given = known(int, **size)
    # A linked size is unknown until the run.
    if len(given) == len(size):
        video_shape(space, **given)


def check_tensor_ram(nbytes: int, name: str) -> None:
    """Raise InsufficientMemoryError for a tensor too large for RAM. The process would be killed."""
    remedy = "make the video smaller or shorter, or batch_size smaller"
    check_ram(nbytes, subject=f"{name} takes", remedy=remedy)


def check_video_ram(shape: VideoShape, name: str) -> None:
    """Raise InsufficientMemoryError if a video's frames, in float32, do not fit into RAM."""
    check_tensor_ram(shape.width * shape.height * shape.frames * 3 * FP32_BYTES, name)


def vae_of(files: Files, name: str) -> tuple[Path, LatentSpace]:
    """Return path and latent space for the named VAE."""
    path = files.model_path(name, *ENCODER_FOLDERS)
    return path, open_vae(path).space


def empty_latent(space: LatentSpace, shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    """Return a LATENT with float32 zeros.

    Raises InsufficientMemoryError if there is too little RAM.
    """
    # `torch.zeros` itself would not fail, because Linux allocates pages at the first write.
    check_tensor_ram(batch_size * space.channels * prod(shape.latent) * FP32_BYTES, "the latent")
    return {"samples": torch.zeros(batch_size, space.channels, *shape.latent)}


class UnknownModelError(ValueError):
    """No latent space has this model name."""


def _space_named(model: object) -> LatentSpace:
    if isinstance(model, str) and model in MODELS:
        return MODELS[model]
    raise UnknownModelError(
        f"model is {model!r}, which is unknown: choose {' or '.join(map(repr, MODELS))}"
    )


class WanStreamEmptyLatent(io.ComfyNode):
    """Empty latent for a text-to-video run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamEmptyLatent",
            display_name="Wan Empty Latent",
            category="WanStream/video",
            **search_aliases("t2v, text to video, empty video latent"),
            description="An empty latent of the right size for a video made from text alone.",
            inputs=[
                *SIZE_INPUTS,
                io.Combo.Input(
                    "model",
                    options=list(MODELS),
                    default=WAN21.models,
                    optional=True,
                    tooltip="Model of the latent: 16 channels and 8 pixels per latent pixel, or 48 "
                    "and 16. Wan2.2 5B has a fourth of the tokens for the same size.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        model: str | None = WAN21.models,
    ) -> bool:
        # A workflow without this input gets the default.
        # A linked model is None until the run.
        if model is not None:
            check_size(_space_named(model), width=width, height=height, frames=frames)
        return True

    @classmethod
    def execute(
        cls, width: int, height: int, frames: int, batch_size: int, model: str = WAN21.models
    ) -> io.NodeOutput:
        space = _space_named(model)
        shape = video_shape(space, width=width, height=height, frames=frames)
        return io.NodeOutput(empty_latent(space, shape, batch_size))


Conditioning = list[list[Any]]
"""ComfyUI's CONDITIONING: pairs of an embedding [1, L, 4096] and a dictionary with extra values."""

CROPS = {"none": False, "center": True}


def prompt_inputs() -> list[io.Input]:
    """Return the inputs for both prompts, for a node that adds values to them."""
    tooltip = "From Wan Text Encode; goes on to the sampler."
    return [io.Conditioning.Input(name, tooltip=tooltip) for name in ("positive", "negative")]


def condition_outputs() -> list[io.Output]:
    """Return the outputs for a node with both prompts and a latent."""
    prompts = [io.Conditioning.Output(display_name=name) for name in ("positive", "negative")]
    return [*prompts, io.Latent.Output(display_name="latent")]


def conditioned(
    host: Host,
    positive: Conditioning,
    negative: Conditioning,
    values: Mapping[str, object],
    latent: Mapping[str, torch.Tensor],
    *notices: Notice,
) -> io.NodeOutput:
    """Return both prompts with `values`, the latent, and notices on the node's files."""
    # False sorts before True, and equal levels keep their order.
    warnings_first = sorted(notices, key=lambda notice: notice.level == "note")
    prompts = (added(positive, values), added(negative, values))
    return noticed(host, *prompts, latent, notices=warnings_first)


class SizedNode(FileNode):
    """Node with `SIZE_INPUTS`, a VAE and perhaps an image encoder, all checked before nodes run."""

    FILES: ClassVar = {"vae": ENCODER_FOLDERS, "clip_vision": CLIP_FOLDERS}
    LISTED_INPUTS = ("vae", "clip_vision")

    @classmethod
    def validate_inputs(
        cls,
        vae: str | None = None,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        clip_vision: str | None = None,
    ) -> bool:
        # Multiples of 16, as in Wan2.1. For 5B, `execute` checks multiples of 32.
        check_size(width=width, height=height, frames=frames)
        check_encoder(current_host(), vae)
        check_clip_vision(current_host(), clip_vision)
        return True


class UnsupportedImageError(ValueError):
    """A connected input does not suit the model, or a required one is missing."""


class WanStreamImageToVideo(SizedNode):
    """First and last frames for an image-to-video run, in the format of ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamImageToVideo",
            display_name="WanStream Image to Video",
            category="WanStream/video",
            **search_aliases("i2v, img2vid, flf2v, first last frame, start image, end image"),
            description="Encodes a start image and an optional end image for the sampler and adds "
            "them to both prompts. Needs I2V experts, or Wan2.2 5B and its VAE.",
            inputs=[
                *prompt_inputs(),
                cls.file_input("vae", tooltip=VAE_TOOLTIP),
                io.Image.Input(
                    "image",
                    tooltip="The first frame; several images are the first frames in order.",
                ),
                *SIZE_INPUTS,
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="The last frame; several images are the last frames in order. Costs "
                    "nothing: the whole video is encoded in any case. Not for Wan2.2 5B.",
                ),
                cls.file_input(
                    "clip_vision",
                    no_file=NONE,
                    optional=True,
                    tooltip="For Wan2.1 I2V: clip_vision_h.safetensors, or the diffusers pipeline "
                    "folder with the image encoder. Its layers are streamed (0.2 GB of device "
                    "memory, 1.3 GB read). Wan2.2 needs none.",
                ),
                io.Combo.Input(
                    "clip_crop",
                    options=list(CROPS),
                    default="none",
                    optional=True,
                    tooltip="Part of the start image for CLIP. none: all of it, scaled to a "
                    "square, as in Wan's own code. center: its central square, as in "
                    "diffusers. Costs nothing.",
                ),
            ],
            outputs=condition_outputs(),
        )

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
        host = current_host()
        path, space = vae_of(host.files, vae)
        shape = video_shape(space, **size)
        encode = partial(encode_here, host, path)
        if space != WAN21:
            _check_one_image(end_image, clip_vision)
            latent = latent_with_first_frames(encode, image, shape, batch_size)
            # 5B reads the start image from the latent, so the prompts stay as they are.
            return noticed(host, positive, negative, latent, notices=check_encoder(host, vae))
        # The whole video is encoded, with grey frames behind the start image.
        check_video_ram(shape, "the video with the start image")
        values = start_image_values(encode, image, end_image, shape)
        if clip_vision != NONE:
            values[IMAGE_EMBEDDING_KEY] = image_embedding(
                host, image, clip_vision, crop=CROPS[clip_crop]
            )
        notices = check_encoder(host, vae) + check_clip_vision(host, clip_vision)
        return conditioned(
            host, positive, negative, values, empty_latent(space, shape, batch_size), *notices
        )


def image_embedding(
    host: Host, image: torch.Tensor, clip_vision: str, *, crop: bool = False
) -> object:
    """Return the CLIP embedding of the first image in `image`, by the named encoder."""
    encoder = open_image_encoder(host.files.model_path(clip_vision, *CLIP_FOLDERS))
    return encoder.encode(
        image[:1], device=host.memory.device(), crop=crop, check=host.events.raise_if_stopped
    )


def _check_one_image(end_image: torch.Tensor | None, clip_vision: str) -> None:
    inputs = (("end_image", end_image is not None), ("clip_vision", clip_vision != NONE))
    unsupported = [name for name, connected in inputs if connected]
    if unsupported:
        raise UnsupportedImageError(
            f"{' and '.join(unsupported)} given with the VAE of Wan2.2 5B, which takes only a "
            "start image: disconnect it, or use an I2V model of Wan2.1 or Wan2.2 A14B and its VAE"
        )


def added(conditioning: Conditioning, values: Mapping[str, object]) -> Conditioning:
    """Return a copy with `values` added."""
    # Never in place: ComfyUI may keep the original in a cache.
    return [[embedding, {**extra, **values}] for embedding, extra in conditioning]
