"""Solvers: diffusers schedulers that follow given sigmas.

One solver serves the whole run, so that the history survives the expert switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...plan.programs import TRAIN_TIMESTEPS
from .errors import RequestError
from .schedules import HIGHEST_BELOW_ONE, Schedule

SEED_COUNT = 2**64
"""Number of different generator seeds."""


class Method(NamedTuple):
    """Scheduler from diffusers, and the facts about it that a solver needs."""

    scheduler: str
    """Class name in diffusers, imported on first use."""
    history: tuple[str, ...] = ("_step_index",)
    """Scheduler attributes that depend on previous steps."""
    settings: Mapping[str, Any] = MappingProxyType({})
    highest_sigma: float = 1.0
    """Larger sigmas are lowered to it."""
    draws_noise: bool = False
    """True if every step draws noise."""


_FLOW = MappingProxyType({"prediction_type": "flow_prediction", "use_flow_sigmas": True})

SOLVERS: Mapping[str, Method] = {
    # First order, one straight line per step.
    "euler": Method("FlowMatchEulerDiscreteScheduler"),
    # Order 2 (bh2), configured as in diffusers' Wan pipelines. At a sigma of exactly 1 its
    # log(1 - sigma) is infinite. diffusers steps down from 1 in the same way.
    "unipc": Method(
        "UniPCMultistepScheduler",
        history=(
            "_step_index",
            "model_outputs",
            "timestep_list",
            "last_sample",
            "lower_order_nums",
            "this_order",
        ),
        settings=_FLOW,
        highest_sigma=HIGHEST_BELOW_ONE,
    ),
    # Order 2 (midpoint, multistep) on flow sigmas. The last step has first order. So has the step
    # after a sigma of exactly 1, whose log signal-to-noise ratio is infinite.
    "dpm++": Method(
        "DPMSolverMultistepScheduler",
        history=("_step_index", "model_outputs", "lower_order_nums"),
        settings=_FLOW,
    ),
    # Jumps to the estimated end in every step, and adds fresh noise at the next level.
    "lcm": Method("FlowMatchLCMScheduler", draws_noise=True),
}
"""Solvers by name."""


class Solver:
    """Step rule for a run, called once per step in order: a scheduler with sigmas from `schedule`.

    Args:
        name: one of `SOLVERS`.
        start_step: first step of the run.
        seeds: one per sample, for solvers that draw noise in every step. The noise is drawn on the
            CPU and depends on the seed and the step only.

    Raises:
        RequestError: the solver needs seeds and there are none.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        start_step: int = 0,
        *,
        seeds: Sequence[int] | None = None,
    ) -> None:
        # Imported late: ComfyUI imports this module at startup, and diffusers takes seconds.
        import diffusers

        method = SOLVERS[name]
        if method.draws_noise and seeds is None:
            raise RequestError(
                f"the solver {name} draws noise in every step: give a seed for each sample"
            )
        levels = torch.tensor(
            [min(sigma, method.highest_sigma) for sigma in schedule.sigmas], dtype=torch.float32
        )
        scheduler = getattr(diffusers, method.scheduler)(**method.settings)
        # The sigmas are set afterwards: `set_timesteps(sigmas=...)` would apply the scheduler's own
        # shift to them.
        scheduler.set_timesteps(schedule.steps)
        scheduler.sigmas = levels
        scheduler.timesteps = levels[:-1] * TRAIN_TIMESTEPS
        # With a begin index the scheduler counts its steps. Otherwise it would search for the
        # timestep by value.
        scheduler.set_begin_index(start_step)
        self._scheduler = scheduler
        self._history = method.history
        # The same for all steps: schedulers read sigmas by the index that they count.
        self._timestep = scheduler.timesteps[start_step]
        self._seeds = None
        if method.draws_noise:
            self._seeds = seeds

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents after the present step.

        The arguments are float32 tensors with one shape. They are not changed.
        """
        drawn = {} if self._seeds is None else {"generator": self._generators(self._seeds)}
        after: torch.Tensor = self._scheduler.step(
            velocity, self._timestep, latents, return_dict=False, **drawn
        )[0]
        return after

    def _generators(self, seeds: Sequence[int]) -> list[torch.Generator]:
        """Return a new generator per sample.

        A step repeated here or in another process then draws the same.
        """
        # None before the first step.
        step = self._scheduler.step_index
        if step is None:
            step = self._scheduler.begin_index
        return [torch.Generator().manual_seed((seed + step) % SEED_COUNT) for seed in seeds]

    def copy(self) -> Solver:
        """Return an independent solver with the same history."""
        other = copy(self)
        # Shallow, except for lists: schedulers replace the tensors in their history, but shift its
        # lists in place.
        other._scheduler = copy(self._scheduler)
        for name, value in vars(self._scheduler).items():
            if isinstance(value, list):
                setattr(other._scheduler, name, list(value))
        return other

    def history(self) -> dict[str, Any]:
        """Return the history of the steps so far: numbers, and CPU copies of tensors."""
        return {
            name: _copied(getattr(self._scheduler, name), torch.device("cpu"))
            for name in self._history
        }

    def restore(self, history: Mapping[str, Any], device: torch.device) -> None:
        """Continue from the history of a solver with this name and schedule, on `device`."""
        for name in self._history:
            # Copied, because the scheduler shifts lists in place and the state may be used again.
            setattr(self._scheduler, name, _copied(history[name], device))


def _copied(value: Any, device: torch.device) -> Any:
    """Copy a scheduler's history value to `device`.

    0-d tensors are timesteps and stay on the CPU.
    """
    if isinstance(value, list):
        return [_copied(each, device) for each in value]
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True) if value.ndim else value.clone()
    return value
