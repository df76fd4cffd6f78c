"""Inputs shared by several nodes."""

from __future__ import annotations

from inspect import signature
from types import UnionType
from typing import Any

from ..host import io
from . import sockets

# 0.3.64 has no `advanced` and raises TypeError for an unknown argument.
_INPUT_ARGUMENTS = frozenset(signature(io.Int.Input).parameters)


def advanced() -> dict[str, Any]:
    """Return the argument of an input that ComfyUI shows under its advanced inputs.

    Empty in ComfyUI versions that always show all inputs.
    """
    return {"advanced": True} if "advanced" in _INPUT_ARGUMENTS else {}


def known(kind: type[int | float] | UnionType, **inputs: object) -> dict[str, Any]:
    """Return the inputs that are numbers of this kind, in `validate_inputs`.

    A linked value is None until the run. The host itself refuses text for a number.
    """
    return {name: value for name, value in inputs.items() if isinstance(value, kind)}


def limits(least: float, most: float, *, step: float | None = None) -> dict[str, Any]:
    """Return a number's range as input arguments."""
    return {"min": least, "max": most, "step": step}


def prefix_input(default: str, text: str) -> io.Input:
    """Return the input for a file name in the output folder."""
    tooltip = f"Name below the output folder; a counter is appended. {text}"
    return io.String.Input("filename_prefix", default=default, tooltip=tooltip)


EXPERTS_INPUT = sockets.Experts.Input(
    "experts", tooltip="From Wan Experts (streamed) or Wan Model (single)."
)

POSITIVE_INPUT = io.Conditioning.Input(
    "positive",
    tooltip="From Wan Text Encode or CLIP Text Encode; with an image, from an image-to-video node.",
)

NEGATIVE_INPUT = io.Conditioning.Input(
    "negative", tooltip="Like positive. Costs nothing if a guidance is 1."
)


def shift_input(tooltip: str) -> io.Input:
    # The minimum is above 0, because a shift of 0 makes all noise levels 0.
    return io.Float.Input(
        "flow_shift", default=12.0, min=0.01, max=100.0, step=0.01, tooltip=tooltip
    )


SHIFT_INPUT = shift_input(
    "Higher: more steps at high noise, and so in the high-noise expert. 12 for text-to-video, 5 "
    "for image-to-video."
)

BOUNDARY_INPUT = io.Float.Input(
    "boundary_ratio",
    default=0.875,
    **limits(0.0, 1.0, step=0.001),
    **advanced(),
    tooltip="The low-noise expert runs below this noise level: 0.875 for text-to-video, 0.9 for "
    "image-to-video. The switch itself costs nothing: the next expert's blocks are fetched "
    "ahead. Not used by a single model, which runs every step.",
)

POLICY_INPUT = sockets.Policy.Input(
    "policy",
    optional=True,
    tooltip="Device memory of the experts. Without a policy: layerwise, the smallest (1.4 GB in "
    "bf16).",
)

WORKERS_INPUT = sockets.Workers.Input(
    "workers",
    optional=True,
    tooltip="From Wan Workers (many GPUs), which compute the run with the same result. Starting "
    "them costs some seconds, once. Without workers: this process alone.",
)

GUIDANCE_INPUT = sockets.Guidance.Input(
    "guidance",
    optional=True,
    tooltip="From Wan Guidance: guidance for each step, or a negative prompt in steps without. "
    "Default: guidance_high and guidance_low.",
)

WINDOWS_INPUT = sockets.Windows.Input(
    "windows",
    optional=True,
    tooltip="From Wan Context Windows, for videos of more than 81 frames. Windows share the "
    "weights, not the compute. Default: the whole video at once.",
)

CACHE_INPUT = sockets.Cache.Input(
    "cache",
    optional=True,
    tooltip="From Wan Cache: skips steps that are similar to the one before. Saves their time and "
    "bytes, and costs quality. Without a cache, every step computes all blocks.",
)

PREVIEW_INPUT = sockets.Preview.Input(
    "preview",
    optional=True,
    tooltip="From Wan Moving Preview: the first frames of the video, on this node while it runs. "
    "After the first one, they take at most a twentieth of the time. They do not change the "
    "result. Without it: ComfyUI's own preview method.",
)
