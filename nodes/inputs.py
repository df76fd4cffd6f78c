"""Inputs that several nodes share, and warnings about unlikely values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..host import current_host, io
from ..sampling import RequestError
from ..wan import ATTENTIONS
from . import sockets


def experts_input() -> io.Input:
    return sockets.Experts.Input("experts", tooltip="From Wan Experts (streamed) or Wan Model (single).")


def attention_input() -> io.Input:
    return io.Combo.Input(
        "attention",
        options=list(ATTENTIONS),
        default="default",
        optional=True,
        tooltip="Whose kernel computes attention, most of the time of a long video. default: what diffusers chooses, "
        "which is sdpa, torch's own. The others need a GPU and bf16 or fp16 (xformers fp32 too), and all but cudnn a "
        "package of that name. All round differently; sage also computes in 8 bits, which costs some precision.",
    )


def compile_input() -> io.Input:
    return io.Boolean.Input(
        "compile",
        default=False,
        optional=True,
        tooltip="Compile the blocks with torch.compile, for faster steps. Costs a wait in the first step after a "
        "start, and once more for a second video size; not for the other expert, another LoRA or another run. Last "
        "digits of the result differ. Needs Triton on a GPU, a C++ compiler on a CPU.",
    )


def report_once(answer: bool | str) -> bool:
    """Raise RequestError for a refusal instead of returning it from a `validate_inputs` of several inputs."""
    # ComfyUI shows a returned refusal under every input of the signature, an exception only once.
    if isinstance(answer, str):
        raise RequestError(answer)
    return answer


def boundary_input() -> io.Input:
    return io.Float.Input(
        "boundary_ratio",
        default=0.875,
        min=0.0,
        max=1.0,
        step=0.001,
        tooltip="The noise level below which the low-noise expert takes over: 0.875 for text-to-video, 0.9 for "
        "image-to-video. The switch itself costs nothing: the next expert's blocks are fetched ahead. Not used by one "
        "expert, which runs every step.",
    )


def policy_input() -> io.Input:
    return sockets.Policy.Input(
        "policy",
        optional=True,
        tooltip="How much device memory the experts may take. Without it: layerwise, the smallest (1.4 GB in bf16).",
    )


def workers_input() -> io.Input:
    return sockets.Workers.Input(
        "workers",
        optional=True,
        tooltip="From Wan Workers (many GPUs): they compute the run. The result is the same; starting them costs some "
        "seconds, once. Without it: this process alone.",
    )


def guidance_input() -> io.Input:
    return sockets.Guidance.Input(
        "guidance",
        optional=True,
        tooltip="From Wan Guidance: a guidance for each step, or a negative prompt in steps without. Without it: "
        "guidance_high and guidance_low.",
    )


def windows_input() -> io.Input:
    return sockets.Windows.Input(
        "windows",
        optional=True,
        tooltip="From Wan Context Windows, for videos of more than 81 frames. Windows share the weights, not the "
        "compute. Without it: the video as a whole.",
    )


def cache_input() -> io.Input:
    return sockets.Cache.Input(
        "cache",
        optional=True,
        tooltip="From Wan Cache: steps that are much like the one before are left out. Saves their time and bytes, and "
        "costs quality. Without it: every step computes all of its blocks.",
    )


logger = logging.getLogger("wanstream.nodes")

WARNINGS = "wanstream_warnings"
"""Key of the warnings in the history; the text on the node repeats them."""


class StrictError(ValueError):
    """A warning that is an error in strict mode (`--strict`, or the setting in ComfyUI)."""


def warnings_ui(warnings: Sequence[str]) -> dict[str, Any] | None:
    """Log the warnings and return the node's UI output with them, or None if there are none.

    Raises:
        StrictError: there are warnings and the host is strict.
    """
    if not warnings:
        return None
    if current_host().strict():
        raise StrictError(f"{'; '.join(warnings)}. This is an error because the run is strict")
    for warning in warnings:
        logger.warning("%s", warning)
    return {"text": ["\n".join(f"Warning: {warning}" for warning in warnings)], WARNINGS: list(warnings)}
