"""The size of a run, and the empty latent that a run from text alone starts from."""

from __future__ import annotations

from math import prod

import torch

from ..host import io, search_words
from ..offload.available_memory import surely_lacks
from ..plan.figure_words import need_text
from ..plan.shapes import FP32_BYTES, VideoShape
from ..sampling import NoRoomError
from ..wan.latent_space import SPACES, WAN21, LatentSpace
from .expert_inputs import said_once

MODELS = {space.models: space for space in SPACES}
LARGEST = {"width": 4096, "height": 4096, "frames": 1025}


def size_inputs() -> list[io.Input]:
    """Size and number of the videos."""
    return [
        io.Int.Input(
            "width",
            default=832,
            min=16,
            max=LARGEST["width"],
            step=16,
            tooltip="Multiple of 16, for Wan2.2 5B of 32. A step costs more than in proportion to width x height x "
            "frames: 1280x720 takes about four times as long per block as 832x480.",
        ),
        io.Int.Input(
            "height", default=480, min=16, max=LARGEST["height"], step=16, tooltip="Multiple of 16 or 32; see width."
        ),
        io.Int.Input(
            "frames",
            default=81,
            min=1,
            max=LARGEST["frames"],
            step=4,
            tooltip="4n + 1. 81 are 5 seconds at 16 fps, what Wan2.2 A14B was trained on, and 121 at 24 fps, which 5B "
            "makes; every 4 more cost one latent frame.",
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


def video_shape(space: LatentSpace, **size: int) -> VideoShape:
    """The shape of a video of that width, height and number of frames; raises ValueError if it cannot be made."""
    for name, value in size.items():
        if value > LARGEST[name]:
            raise ValueError(f"{name} is {value}: use {LARGEST[name]} or less")
    return VideoShape(**size, per_latent=space.pixels)


def size_refusal(space: LatentSpace = WAN21, **size: object) -> bool | str:
    """For `validate_inputs`: why such a video cannot be made, told before anything runs; True if it can.

    What is no number is left to others: a link is None here and known only at the run, and text is refused by the host.
    """
    known = {name: value for name, value in size.items() if isinstance(value, int)}
    try:
        if len(known) == len(size):
            video_shape(space, **known)
    except ValueError as err:
        return str(err)
    return True


def check_tensor_ram(nbytes: int, what: str) -> None:
    """Refuse to make a tensor that the system would end the process for. Raises NoRoomError."""
    lacking = surely_lacks(nbytes)
    if lacking is not None:
        raise NoRoomError(
            f"{what} takes {need_text(nbytes)} of RAM, and {need_text(lacking)} are free (swap included): make the "
            "video smaller or shorter, or batch_size smaller"
        )


def empty_latent(space: LatentSpace, shape: VideoShape, batch_size: int) -> dict[str, torch.Tensor]:
    """A LATENT of zeros. Raises NoRoomError where there is too little RAM for it."""
    check_tensor_ram(batch_size * space.channels * prod(shape.latent) * FP32_BYTES, "the latent")
    return {"samples": torch.zeros(batch_size, space.channels, *shape.latent)}


class WanStreamEmptyLatent(io.ComfyNode):
    """The size of a text-to-video run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamEmptyLatent",
            display_name="Wan Empty Latent",
            category="WanStream/video",
            **search_words("t2v", "text to video", "empty video latent"),
            description="An empty latent of the right size for a video made from text alone.",
            inputs=[
                *size_inputs(),
                io.Combo.Input(
                    "model",
                    options=list(MODELS),
                    default=WAN21.models,
                    optional=True,
                    tooltip="Whose latent it is: of 16 channels and 8 pixels for each latent pixel, or of 48 and 16. "
                    "The same size has a fourth of the tokens with Wan2.2 5B.",
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
    ) -> bool | str:
        if model not in MODELS:
            return True
        return said_once(size_refusal(MODELS[model], width=width, height=height, frames=frames))

    @classmethod
    def execute(cls, width: int, height: int, frames: int, batch_size: int, model: str = WAN21.models) -> io.NodeOutput:
        space = MODELS[model]
        shape = video_shape(space, width=width, height=height, frames=frames)
        return io.NodeOutput(empty_latent(space, shape, batch_size))
