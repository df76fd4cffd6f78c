"""ComfyUI's samplers: noise schedules, and the dry run that predicts model calls.

A sampler's calls depend on the sigmas and not on the latents, except for adaptive samplers. Only
ComfyUI's own samplers are dry-run. They keep no state between runs, and an error in the dry run
would occur in the real run too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import comfy.model_sampling
import comfy.samplers
import numpy
import torch

from ...devices import forked_random_state
from ...sampling.steps import RequestError, check_flow_shift, partial_sigmas
from ...sampling.steps import schedule_sigmas as own_schedule_sigmas
from . import versions


class FlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """Noise levels for one flow shift: a `model_sampling` for ComfyUI's samplers and schedules."""

    def __init__(self, flow_shift: float) -> None:
        super().__init__()
        check_flow_shift(flow_shift)
        self.set_parameters(shift=flow_shift)


def schedule_names() -> list[str]:
    """Return the names of ComfyUI's schedules, then "wan", the schedule in Wan2.2 and diffusers."""
    return [*comfy.samplers.SCHEDULER_NAMES, "wan"]


def schedule_sigmas(name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
    """Return the last `steps` + 1 values from a schedule with int(steps / denoise) steps.

    The values are float32 on the CPU.
    """
    if name == "wan":
        return own_schedule_sigmas(name, steps, denoise, flow_shift)
    sampling = FlowSampling(flow_shift)

    def make(total: int) -> torch.Tensor:
        sigmas: torch.Tensor = comfy.samplers.calculate_sigmas(sampling, name, total)
        return sigmas.cpu()

    return partial_sigmas(make, steps, denoise)


LATENT_SHAPE = (1, 16, 1, 2, 2)
"""Latent shape in the dry run, with five dimensions because some samplers check them."""

MAX_CALLS = 2000
"""Maximum number of calls. An adaptive sampler may not terminate."""

_PLAIN = (bool, int, float, str, type(None))


class _MaxCallsError(Exception):
    """Ends a dry run."""


class _DryRunGuider:
    """Guider with all attributes that samplers read.

    It records each call's sigma and predicts zeros.
    """

    def __init__(self, guider: Any) -> None:
        self.inner_model = guider.inner_model
        self.model_patcher = guider.model_patcher
        self.cfg = 1.0  # some samplers log it
        self.sigmas: list[float] = []

    def __call__(
        self, x: torch.Tensor, sigma: torch.Tensor, model_options: Any, seed: int | None
    ) -> torch.Tensor:
        self.sigmas.append(float(sigma[0]))
        if len(self.sigmas) == MAX_CALLS:
            raise _MaxCallsError
        zeros = torch.zeros_like(x)
        # Not simply zeros: CFG++ samplers read the negative prediction in a function they put into
        # the options.
        denoised: torch.Tensor = comfy.samplers.cfg_function(
            self.inner_model, zeros, zeros, 1.0, x, sigma, model_options=model_options
        )
        return denoised


def predicted_sigmas(
    guider: Any, sampler: Any, sigmas: torch.Tensor, seed: int | None
) -> list[float] | None:
    """Return the sigma for each model call by `sampler` over `sigmas` [steps + 1].

    Return None if it cannot be dry-run.

    `guider` is a CFGGuider with an `inner_model`. Random states do not change. Raises the sampler's
    own errors.
    """
    if not _is_comfyui_sampler(sampler):
        return None
    dry_run = _DryRunGuider(guider)
    # Not the run's own options, because some samplers write into their options.
    options: dict[str, Any] = {"model_options": {versions.IN_LAYERS: {}}, "seed": seed}
    own_sigmas = sigmas.detach().cpu().clone()  # some samplers write to them
    zeros = torch.zeros(LATENT_SHAPE)
    with preserve_random_state(), suppress(_MaxCallsError):
        # Arguments: guider, sigmas, extra arguments, callback, noise, latent image, mask, no bar.
        sampler.sample(dry_run, own_sigmas, options, None, zeros, zeros.clone(), None, True)
    return dry_run.sigmas


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random states in torch (all devices in use), numpy and Python after `with`."""
    numpys = numpy.random.get_state()
    pythons = random.getstate()
    with forked_random_state():
        try:
            yield
        finally:
            numpy.random.set_state(numpys)
            random.setstate(pythons)


def sampler_name(sampler: Any) -> str:
    """Return a SAMPLER's name for messages."""
    function = versions.sampler_function(sampler)
    return str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")


def _is_comfyui_sampler(sampler: Any) -> bool:
    """Return True if all functions in a SAMPLER are ComfyUI's. Others may keep run state."""
    # A subclass may override `sample` and keep run state.
    if type(sampler) is not comfy.samplers.KSAMPLER:
        return False
    options = (*sampler.extra_options.values(), *sampler.inpaint_options.values())
    functions = [
        versions.sampler_function(sampler),
        *(each for each in options if not isinstance(each, _PLAIN)),
    ]
    return all(callable(each) and versions.is_of_core(each) for each in functions)


def common_sigma(timestep: torch.Tensor) -> float:
    """Return the noise level in a call.

    Raises RequestError if the level differs within the batch.
    """
    levels: list[float] = timestep.flatten().tolist()
    if len(set(levels)) != 1:
        raise RequestError(
            f"the sampler uses {len(set(levels))} noise levels in one model call, but streamed "
            "experts support one: choose another sampler"
        )
    return levels[0]
