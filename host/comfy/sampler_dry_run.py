"""At which noise levels a sampler will call the model: it is run once on next to nothing, before the real run.

When a sampler calls the model depends on its sigmas and not on the latents, the adaptive ones apart; so what is traced
here is what will be. Only ComfyUI's own samplers are traced: they keep nothing from run to run, and what they raise on
a few elements they would raise in the real run, from the same sigmas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import comfy.samplers
import numpy
import torch

from ...sampling import RequestError

TINY = (1, 16, 1, 2, 2)
"""Shape of the latents that a sampler is traced on: five dimensions, because some samplers look at them."""

MOST_CALLS = 2000
"""Calls after which a trace ends: an adaptive sampler need not end on its own."""

_PLAIN = (bool, int, float, str, type(None))


class _EnoughError(Exception):
    """Ends a trace."""


class _Traced:
    """Stands where the guider stands, with all that samplers ask of it, and answers every call with nothing."""

    def __init__(self, guider: Any) -> None:
        self.inner_model, self.model_patcher = guider.inner_model, guider.model_patcher
        self.asked: list[float] = []

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, model_options: Any, seed: int | None) -> torch.Tensor:
        self.asked.append(float(sigma[0]))
        if len(self.asked) == MOST_CALLS:
            raise _EnoughError
        nothing = torch.zeros_like(x)
        # Samplers of the CFG++ kind read what the negative gives through a function that they put into the options.
        denoised: torch.Tensor = comfy.samplers.cfg_function(
            self.inner_model, nothing, nothing, 1.0, x, sigma, model_options=model_options
        )
        return denoised


def predicted_sigmas(guider: Any, sampler: Any, sigmas: torch.Tensor, seed: int | None) -> list[float] | None:
    """The sigma of each call that `sampler` will make over `sigmas` [steps + 1]; None for one that cannot be traced.

    `guider` is a CFGGuider whose `inner_model` is there. Nothing of the random state is used up. Raises what the
    sampler raises of such sigmas.
    """
    if not _is_comfys(sampler):
        return None
    traced = _Traced(guider)
    options: dict[str, Any] = {"model_options": {"transformer_options": {}}, "seed": seed}
    # A copy: some samplers write into their sigmas.
    own_sigmas, nothing = sigmas.detach().cpu().clone(), torch.zeros(TINY)
    with random_state_kept(), suppress(_EnoughError):
        sampler.sample(traced, own_sigmas, options, None, nothing, nothing.clone(), None, True)
    return traced.asked


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever draws random numbers inside, or seeds, leaves no trace: torch (every device in use), numpy, Python."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpys, pythons = numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            numpy.random.set_state(numpys)
            random.setstate(pythons)


def sampler_name(sampler: Any) -> str:
    """What to call a SAMPLER in a message."""
    function = getattr(sampler, "sampler_function", None)
    return str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")


def _is_comfys(sampler: Any) -> bool:
    """Whether all code in a SAMPLER is ComfyUI's, which keeps no state; options of others may be anything."""
    if type(sampler) is not comfy.samplers.KSAMPLER:
        return False
    options = (*sampler.extra_options.values(), *sampler.inpaint_options.values())
    functions = (sampler.sampler_function, *(option for option in options if not isinstance(option, _PLAIN)))
    return all(callable(each) and _module(each).startswith("comfy.") for each in functions)


def _module(function: Callable[..., object]) -> str:
    return str(getattr(function, "__module__", ""))


def one_level(timestep: torch.Tensor) -> float:
    """The noise level of a call, the same for all samples of the batch."""
    levels: list[float] = timestep.flatten().tolist()
    if len(set(levels)) != 1:
        raise RequestError(
            f"the sampler asks for {len(set(levels))} noise levels in one call, and one expert serves one: "
            "choose another sampler"
        )
    return levels[0]
