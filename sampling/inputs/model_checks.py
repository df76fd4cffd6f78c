"""Checks of a request against the model that runs it."""

from __future__ import annotations

from ...schema import TEXT_TOKENS
from ...wan import ExpertPair
from ..errors import RequestError
from .checks import Texts
from .request import DenoiseRequest, check_channels


def check_fits(request: DenoiseRequest, pair: ExpertPair) -> None:
    """Raise RequestError unless the request's channels, steps and image fit the experts.

    An image embedding for experts without an image branch is not an error: it is ignored, as in ComfyUI.
    """
    check_channels(request, pair.in_channels)
    if pair.is_single:
        _check_steps(request)
    width = pair.high.config.image_dim
    if width is not None:
        _check_image(request, width)


def _check_steps(request: DenoiseRequest) -> None:
    step_plan = request.step_plan
    low = [step for step in step_plan.steps if step_plan.experts[step] == "low"]
    if low:
        raise RequestError(
            f"step {low[0]} is one of the low-noise expert, and this is a single model, which runs every step: give "
            "boundary_ratio 0 and no switch_step"
        )


def _check_image(request: DenoiseRequest, width: int) -> None:
    image = request.image_embedding
    if image is None:
        raise RequestError(
            "the model has an image branch (Wan2.1 I2V), and the request has no image embedding: choose a clip_vision "
            "file in WanStream Image to Video, or connect a CLIP Vision output to WanImageToVideo"
        )
    if image.shape[2] != width:
        raise RequestError(
            f"the image embedding is {list(image.shape)}, the model takes [1, tokens, {width}]: use clip_vision_h"
        )
    for name, texts in (("positive", request.positive), ("negative", request.negative)):
        for length in _lengths(texts):
            if length != TEXT_TOKENS:
                raise RequestError(
                    f"{name} has {length} tokens, and a model with an image branch (Wan2.1 I2V) needs "
                    f"{TEXT_TOKENS}: encode it with Wan Text Encode, which pads or cuts to that length"
                )


def _lengths(texts: Texts | None) -> list[int]:
    if texts is None:
        return []
    return [text.shape[-2] for text in texts]
