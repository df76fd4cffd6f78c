"""Checks of a request; every error has the numbers and a remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch

from ...schema import ContextWindows
from ...wan import SPACES
from ..errors import RequestError
from ..schedules import PURE_NOISE

IMAGE_CONDITION_CHANNELS = (20, 32, 36, 52, 100)
"""Channels of an image condition: of I2V and Fun InP, of Fun Control 2.1 and 2.2, and of Fun InP and Fun Control 5B."""
TEXT_WIDTH = 4096
Texts: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""[1 or B, L, 4096] for B samples; or a sequence of one [1, L, 4096] for each sample, of any lengths."""

SAME_SIGMA = 1e-5
"""Largest difference between equal sigmas that two programs computed."""


def check_start(sigma: float, *, step: int, add_noise: bool, has_latent: bool, latent_sigma: float | None) -> None:
    """Raise RequestError if the latent cannot be continued from `sigma`, the noise level at which `step` starts.

    Args:
        latent_sigma: noise level of the latent; None if it is unknown, in which case it is not compared.
    """
    if add_noise:
        if latent_sigma:
            raise RequestError(
                f"the latent still carries noise (left at sigma {latent_sigma:.5f}), and add_noise would add more to "
                "it: turn add_noise off here, or leftover_noise off in the sampler before"
            )
        return
    if not has_latent:
        raise RequestError("add_noise is off and the latent is empty: turn add_noise on, or connect a latent")
    if sigma > PURE_NOISE:
        raise RequestError(
            f"add_noise is off and step {step} starts at sigma {sigma:g}, which is pure noise: set start_step to the "
            "end_step of the sampler before, or turn add_noise on"
        )
    if latent_sigma is not None and abs(latent_sigma - sigma) > SAME_SIGMA:
        remedy = (
            "give both samplers the same steps, schedule and flow_shift (or sigmas), and this one as start_step the "
            "end_step of the sampler before"
            if latent_sigma
            else "turn leftover_noise on in the sampler before, or add_noise on here"
        )
        raise RequestError(
            f"the latent was left at sigma {latent_sigma:.5f}, and step {step} starts at sigma {sigma:.5f}: {remedy}"
        )


def check_step_plan(steps: int, *, start_step: int, switch_step: int | None, end_step: int) -> None:
    """Raise RequestError unless the start, end and switch steps fit a schedule of `steps` steps."""
    if end_step < 1:
        raise RequestError(f"end step {end_step}: give at least 1, the first step runs before step 1")
    if not 0 <= start_step < steps:
        before_end = f", below end_step {end_step}" if end_step <= start_step else ""
        raise RequestError(
            f"start step {start_step} of {steps} steps: give 0 to {min(steps, end_step) - 1}{before_end}"
        )
    if start_step >= end_step:
        raise RequestError(
            f"the run starts with step {start_step} and ends before step {end_step}, so no step is left: set "
            f"start_step below {end_step}, or end_step above {start_step}"
        )
    if switch_step is not None and not 0 <= switch_step <= steps:
        raise RequestError(f"switch step {switch_step} of {steps} steps: give 0 to {steps}")


def check_guidance(guidance: tuple[float, float], of_steps: Sequence[float] | None, *, steps: int) -> None:
    """Raise RequestError unless `guidance` is two numbers and `of_steps`, if given, is 1 to `steps` numbers."""
    is_pair = not isinstance(guidance, int | float) and len(guidance) == 2
    if not is_pair or not all(math.isfinite(scale) for scale in guidance):
        raise RequestError(f"guidance {guidance}: give two numbers, for the high and the low expert")
    if of_steps is None:
        return
    if not of_steps or not all(math.isfinite(scale) for scale in of_steps):
        raise RequestError(f"guidance_steps {tuple(of_steps)}: give a number for each step, the last one for the rest")
    if len(of_steps) > steps:
        raise RequestError(
            f"guidance_steps has {len(of_steps)} numbers for {steps} steps: remove the last {len(of_steps) - steps}"
        )


def check_windows(windows: ContextWindows, frames: int, *, mag_steps: Sequence[int] = ()) -> None:
    """Raise RequestError if the windows are longer than the video, or shift so that MagCache could never skip a step.

    Args:
        frames: latent frames of the video.
        mag_steps: steps of a run with MagCache.
    """
    try:
        windows.check_video(frames)
    except ValueError as err:
        raise RequestError(str(err)) from err
    places = [windows.at(step, frames) for step in mag_steps]
    if len(places) > 1 and all(before != after for before, after in pairwise(places)):
        raise RequestError(
            "the context windows shift in every step, and MagCache skips a step only if all of its windows were "
            "computed in the step before: turn shift_windows off in Wan Context Windows, or use the first-block cache, "
            "which decides for each window"
        )


def check_noise(noise: torch.Tensor) -> None:
    channels = [space.channels for space in SPACES]
    if noise.ndim != 5 or noise.shape[1] not in channels or 0 in noise.shape:
        raise RequestError(f"noise is {list(noise.shape)}: give [B, {' or '.join(map(str, channels))}, T, h, w]")
    if noise.dtype != torch.float32:
        raise RequestError(f"noise is {noise.dtype}: give float32")


def check_texts(name: str, texts: Texts, batch: int) -> None:
    if isinstance(texts, torch.Tensor):
        _check_text(name, texts, batch)
        return
    if len(texts) != batch:
        raise RequestError(f"{name} has {len(texts)} texts for {batch} samples: give one for each")
    for number, text in enumerate(texts, 1):
        _check_text(f"{name} {number} of {batch}", text, 1)


def _check_text(name: str, text: torch.Tensor, batch: int) -> None:
    shape = list(text.shape)
    if text.ndim != 3 or shape[2] != TEXT_WIDTH:
        raise RequestError(f"{name} is {shape}: give a UMT5 embedding [1 or {batch}, tokens, {TEXT_WIDTH}]")
    if shape[1] == 0:
        raise RequestError(f"{name} is {shape}: it has no tokens; encode an empty prompt instead")
    if shape[0] not in (1, batch):
        raise RequestError(f"{name} has {shape[0]} texts for {batch} samples: give 1 or {batch}")
    if not text.is_floating_point():
        raise RequestError(f"{name} is {text.dtype}: give floating point embeddings, not token numbers")


def check_image_embedding(image: torch.Tensor, batch: int) -> None:
    shape = list(image.shape)
    if image.ndim != 3 or 0 in shape or shape[0] not in (1, batch) or not image.is_floating_point():
        wanted = " or ".join(str(size) for size in sorted({1, batch}))
        raise RequestError(
            f"image_embedding is {shape} ({image.dtype}): give the hidden states of CLIP before its last layer, "
            f"[{wanted}, tokens, width]"
        )


def check_latent(
    name: str, value: torch.Tensor, noise: torch.Tensor, channels: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    fits = value.ndim == 5 and value.shape[0] in batches and value.shape[1] in channels
    if not fits or value.shape[2:] != noise.shape[2:]:
        choices = [" or ".join(str(size) for size in sorted(set(sizes))) for sizes in (batches, channels)]
        wanted = [*choices, *noise.shape[2:]]
        raise RequestError(f"{name} is {list(value.shape)}: give [{', '.join(map(str, wanted))}], to match the noise")
    if not value.is_floating_point():
        raise RequestError(f"{name} is {value.dtype}: give floating point values")
