"""Nodes that create the latent of a run: empty, or from images."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..devices import insufficient_ram
from ..host import current_host, io, search_aliases
from ..sampling import (
    IMAGE_EMBEDDING_KEY,
    InsufficientMemoryError,
    latent_with_first_frames,
    start_end_mask,
    start_frames,
    start_mask,
    video_with_start_end,
)
from ..schema import FP32_BYTES, VideoShape, format_need
from ..wan import SPACES, WAN21, LatentSpace, open_image_encoder, open_vae
from .decode import vae_input
from .runs.decode import encode_here
from .runs.file_checks import (
    CLIP_FOLDERS,
    ENCODER_FOLDERS,
    NONE,
    FileReport,
    check_clip_vision,
    check_encoder,
    reports_ui,
)
from .runs.file_node import FileNode

MODELS = {space.models: space for space in SPACES}
MAX_SIZE = {"width": 4096, "height": 4096, "frames": 1025}

SIZE_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "width",
        default=832,
        min=16,
        max=MAX_SIZE["width"],
        step=16,
        tooltip="Multiple of 16, for Wan2.2 5B of 32. The time of a step grows faster than width x height x "
        "frames: 1280x720 takes about four times as long per block as 832x480.",
    ),
    io.Int.Input(
        "height", default=480, min=16, max=MAX_SIZE["height"], step=16, tooltip="Multiple of 16 or 32; see width."
    ),
    io.Int.Input(
        "frames",
        default=81,
        min=1,
        max=MAX_SIZE["frames"],
        step=4,
        tooltip="4n + 1. 81 frames are 5 seconds at 16 fps, the format of Wan2.2 A14B; 5B uses 121 frames at 24 "
        "fps. Every 4 more add one latent frame.",
    ),
    io.Int.Input(
        "batch_size",
        default=1,
        min=1,
        max=64,
        tooltip="Videos made together. Each costs its full compute time, but weights are fetched once for all of them.",
    ),
)
"""Inputs for the size and the number of the videos."""


def video_shape(space: LatentSpace, **size: int) -> VideoShape:
    """Return the shape of a video; raises ValueError for a width, height or number of frames that is not possible."""
    for name, value in size.items():
        if value > MAX_SIZE[name]:
            raise ValueError(f"{name} is {value}: use {MAX_SIZE[name]} or less")
    return VideoShape(**size, per_latent=space.pixels)


def check_size(space: LatentSpace = WAN21, **size: object) -> None:
    """Raise ValueError for a size that is no video's, in `validate_inputs`: before any node runs."""
    # A linked value is None until the run, and the host itself refuses text for a number.
    known = {name: value for name, value in size.items() if isinstance(value, int)}
    if len(known) == len(size):
        video_shape(space, **known)


def check_tensor_ram(nbytes: int, name: str) -> None:
    """Raise InsufficientMemoryError for a tensor whose allocation would make the system kill the process."""
    # `torch.zeros` itself would not fail: Linux overcommits memory and kills the process at the first writes.
    lacking = insufficient_ram(nbytes)
    if lacking is not None:
        raise InsufficientMemoryError(
            f"{name} takes {format_need(nbytes)} of RAM, and {format_need(lacking)} are free (swap included): make the "
            "video smaller or shorter, or batch_size smaller"
        )


def check_video_ram(shape: VideoShape, name: str) -> None:
    """Raise InsufficientMemoryError if the frames of a video, in float32, do not fit into RAM."""
    check_tensor_ram(shape.width * shape.height * shape.frames * 3 * FP32_BYTES, name)


def vae_of(name: str) -> tuple[Path, LatentSpace]:
    """Return the path of the VAE that `vae_input` names, and the space of its latents."""
    path = current_host().model_path(name, *ENCODER_FOLDERS)
    return path, open_vae(path).space


def empty_latent(space: LatentSpace, shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    """Return a LATENT of zeros, float32; raises InsufficientMemoryError if there is too little RAM for it."""
    check_tensor_ram(batch_size * space.channels * prod(shape.latent) * FP32_BYTES, "the latent")
    return {"samples": torch.zeros(batch_size, space.channels, *shape.latent)}


class UnknownModelError(ValueError):
    """No latent space belongs to this name of a model."""


def _space_named(model: object) -> LatentSpace:
    if isinstance(model, str) and model in MODELS:
        return MODELS[model]
    raise UnknownModelError(f"model is {model!r}, which is unknown: choose {' or '.join(map(repr, MODELS))}")


class WanStreamEmptyLatent(io.ComfyNode):
    """Empty latent of a text-to-video run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamEmptyLatent",
            display_name="Wan Empty Latent",
            category="WanStream/video",
            **search_aliases("t2v", "text to video", "empty video latent"),
            description="An empty latent of the right size for a video made from text alone.",
            inputs=[
                *SIZE_INPUTS,
                io.Combo.Input(
                    "model",
                    options=list(MODELS),
                    default=WAN21.models,
                    optional=True,
                    tooltip="Model of the latent: 16 channels and 8 pixels per latent pixel, or 48 and 16. Wan2.2 5B "
                    "has a fourth of the tokens for the same size.",
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
        # A linked model is None until the run.
        if model is not None:
            check_size(_space_named(model), width=width, height=height, frames=frames)
        return True

    @classmethod
    def execute(cls, width: int, height: int, frames: int, batch_size: int, model: str = WAN21.models) -> io.NodeOutput:
        space = _space_named(model)
        shape = video_shape(space, width=width, height=height, frames=frames)
        return io.NodeOutput(empty_latent(space, shape, batch_size))


Conditioning = list[list[Any]]
"""ComfyUI's CONDITIONING: pairs of an embedding [1, L, 4096] and a dictionary with its extra values."""

CROPS = {"none": False, "center": True}


def prompt_inputs() -> list[io.Input]:
    """Return the inputs for both prompts of a node that adds values to them."""
    tooltip = "From Wan Text Encode; goes on to the sampler."
    return [io.Conditioning.Input(name, tooltip=tooltip) for name in ("positive", "negative")]


def clip_vision_input(tooltip: str) -> io.Input:
    names = [NONE, *current_host().model_names(*CLIP_FOLDERS)]
    return io.Combo.Input("clip_vision", options=names, default=NONE, optional=True, tooltip=tooltip)


def condition_outputs() -> list[io.Output]:
    """Return the outputs of a node with both prompts and a latent."""
    prompts = [io.Conditioning.Output(display_name=name) for name in ("positive", "negative")]
    return [*prompts, io.Latent.Output(display_name="latent")]


def conditioned(
    positive: Conditioning,
    negative: Conditioning,
    values: Mapping[str, object],
    latent: Mapping[str, torch.Tensor],
    *reports: FileReport,
) -> io.NodeOutput:
    """Return both prompts with `values`, the latent, and the reports about the node's files."""
    return io.NodeOutput(added(positive, values), added(negative, values), latent, ui=reports_ui(*reports))


class SizedNode(FileNode):
    """Node with `SIZE_INPUTS`, a VAE and perhaps an image encoder, which are checked before any node runs."""

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
        check_size(width=width, height=height, frames=frames)
        check_encoder(vae)
        check_clip_vision(clip_vision)
        return True


class UnsupportedImageError(ValueError):
    """An input was connected for a model that does not take it, or one is missing that a model needs."""


class WanStreamImageToVideo(SizedNode):
    """First and last frames of an image-to-video run, in the format of ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamImageToVideo",
            display_name="WanStream Image to Video",
            category="WanStream/video",
            **search_aliases("i2v", "img2vid", "flf2v", "first last frame", "start image", "end image"),
            description="Encodes a start image and an optional end image for the sampler and adds them to both "
            "prompts. Needs I2V experts, or Wan2.2 5B and its VAE.",
            inputs=[
                *prompt_inputs(),
                vae_input(),
                io.Image.Input("image", tooltip="The first frame; several images are the first frames in order."),
                *SIZE_INPUTS,
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="The last frame; several images are the last frames in order. Costs nothing: the whole "
                    "video is encoded in any case. Not for Wan2.2 5B.",
                ),
                clip_vision_input(
                    "For Wan2.1 I2V: clip_vision_h.safetensors, or the diffusers pipeline folder with the image "
                    "encoder. Its layers are streamed (0.2 GB of device memory, 1.3 GB read). Wan2.2 needs none."
                ),
                io.Combo.Input(
                    "clip_crop",
                    options=list(CROPS),
                    default="none",
                    optional=True,
                    tooltip="Part of the start image for CLIP. none: all of it, scaled to a square, as in Wan's own "
                    "code. center: its central square, as in diffusers. Costs nothing.",
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
        path, space = vae_of(vae)
        shape = video_shape(space, **size)
        if space != WAN21:
            _check_one_image(end_image, clip_vision)
            latent = _latent_from_image(path, image, shape, batch_size)
            return io.NodeOutput(positive, negative, latent, ui=reports_ui(check_encoder(vae)))
        check_video_ram(shape, "the video with the start image")
        video = video_with_start_end(image, end_image, shape)
        mask = _start_mask(image, end_image, shape)
        values: dict[str, object] = {"concat_latent_image": encode_here(path, video), "concat_mask": mask}
        if clip_vision != NONE:
            values[IMAGE_EMBEDDING_KEY] = image_embedding(image, clip_vision, crop=CROPS[clip_crop])
        reports = check_encoder(vae), check_clip_vision(clip_vision)
        return conditioned(positive, negative, values, empty_latent(space, shape, batch_size), *reports)


def image_embedding(image: torch.Tensor, clip_vision: str, *, crop: bool = False) -> object:
    """Return the CLIP embedding of the first of `image` by the encoder of that name."""
    host = current_host()
    encoder = open_image_encoder(host.model_path(clip_vision, *CLIP_FOLDERS))
    return encoder.encode(image[:1], device=host.device(), crop=crop, check=host.raise_if_stopped)


def _start_mask(image: torch.Tensor, end_image: torch.Tensor | None, shape: VideoShape) -> torch.Tensor:
    if end_image is None:
        return start_mask(len(image), shape)
    return start_end_mask(len(image), len(end_image), shape)


def _latent_from_image(vae: Path, image: torch.Tensor, shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    """Return a LATENT of Wan2.2 5B with the images as its first frames and a noise mask that protects them."""
    return latent_with_first_frames(encode_here(vae, start_frames(image, shape)), shape, batch_size)


def _check_one_image(end_image: torch.Tensor | None, clip_vision: str) -> None:
    inputs = (("end_image", end_image is not None), ("clip_vision", clip_vision != NONE))
    unsupported = [name for name, connected in inputs if connected]
    if unsupported:
        raise UnsupportedImageError(
            f"{' and '.join(unsupported)} given with the VAE of Wan2.2 5B, which takes only a start image: "
            "disconnect it, or use an I2V model of Wan2.1 or Wan2.2 A14B and its VAE"
        )


def added(conditioning: Conditioning, values: Mapping[str, object]) -> Conditioning:
    """Return a copy that also carries `values`."""
    # Never in place: ComfyUI may keep the original in a cache.
    return [[embedding, {**extra, **values}] for embedding, extra in conditioning]
