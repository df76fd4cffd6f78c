"""What the widgets of a sampler ask for: a request, or the reason why there can be none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..plan.experts import TRAIN_TIMESTEPS
from ..sampling import DenoiseRequest, NativeInputs, RequestError, native_inputs
from ..sampling.checks import check_course
from ..sampling.guidance import Guidance
from ..sampling.schedules import check_steps
from .sample_inputs import FROM_BOUNDARY, TO_THE_END

if TYPE_CHECKING:
    import torch

NOT_CONNECTED = object()
"""Stands for sigmas that are not linked; a link is None until the run."""


def course_refusal(steps: object, start_step: object, switch_step: object, end_step: object) -> bool | str:
    """For `validate_inputs`: why a run of such steps cannot be, told before the text encoder runs; True if it can.

    A host checks no range of an input that is checked here. What is no number is left to others: a link is None here
    and known only at the run, and text is refused by the host. Connected sigmas bring a number of steps of their own.
    """
    count = steps if isinstance(steps, int) else TRAIN_TIMESTEPS
    start = start_step if isinstance(start_step, int) else 0
    switch = switch_step if isinstance(switch_step, int) else FROM_BOUNDARY
    end = end_step if isinstance(end_step, int) else TO_THE_END
    try:
        check_steps(count)
        check_course(count, start_step=start, switch_step=None if switch == FROM_BOUNDARY else switch, end_step=end)
    except RequestError as err:
        return str(err)
    return True


def request_of(
    positive: Sequence[Any],
    negative: Sequence[Any],
    latent: Mapping[str, Any],
    guidance: Guidance | None = None,
    **settings: Any,
) -> DenoiseRequest:
    """The run that native values and the widgets of a sampler describe.

    Raises RequestError for what the experts cannot use, and for settings that do not fit together.
    """
    # Without guidance nothing reads the negative, whatever it carries.
    said = guidance or Guidance()
    scales = said.steps or (settings["guidance_high"], settings["guidance_low"])
    used = negative if said.nag is not None or any(scale != 1 for scale in scales) else None
    inputs = native_inputs(positive, used, latent)
    return _request(inputs, guidance_steps=said.steps, nag=said.nag, **settings)


def _request(
    inputs: NativeInputs,
    *,
    seed: int,
    steps: int,
    switch_step: int,
    guidance_high: float,
    guidance_low: float,
    add_noise: bool = True,
    sigmas: torch.Tensor | None = None,
    **settings: Any,
) -> DenoiseRequest:
    """`settings` are those that the request calls by the same name."""
    return DenoiseRequest(
        inputs.noise(seed if add_noise else None),
        inputs.positive,
        negative=inputs.negative,
        image_condition=inputs.image_condition,
        image_embedding=inputs.image_embedding,
        latent=inputs.latent,
        latent_sigma=inputs.latent_sigma,
        mask=inputs.mask,
        add_noise=add_noise,
        steps=steps if sigmas is None else None,
        sigmas=sigmas,
        switch_step=None if switch_step == FROM_BOUNDARY else switch_step,
        guidance=(guidance_high, guidance_low),
        **settings,
    )
