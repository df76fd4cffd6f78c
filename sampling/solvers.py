"""Solvers: diffusers schedulers that follow given sigmas.

One solver serves the whole run, so that its history survives the expert switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch

from ..plan import TRAIN_TIMESTEPS
from .errors import RequestError
from .schedules import HIGHEST_BELOW_ONE, Schedule

SEED_COUNT = 2**64
"""Number of different seeds of a generator."""


class Solver(Protocol):
    """Step rule of one run, called once per step, in order."""

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents after the present step; the arguments, float32 of one shape, are not changed."""

    def copy(self) -> Solver:
        """Return an independent solver with the same history."""

    def history(self) -> Mapping[str, Any]:
        """Return the history of the steps so far: numbers, and copies of tensors on the CPU."""

    def restore(self, history: Mapping[str, Any], device: torch.device) -> None:
        """Continue from the history of a solver of the same name and schedule, with its latents on `device`."""


class DiffusersSolver:
    """A diffusers scheduler that follows the given sigmas (steps + 1 values) from step `start_step` on.

    Args:
        history_attributes: attributes of the scheduler that depend on former steps.
        seeds: one for each sample, for a scheduler that draws noise in every step. The noise is drawn on the CPU and
            depends on the seed and the step only.
    """

    def __init__(
        self,
        scheduler: Any,
        sigmas: Sequence[float],
        start_step: int,
        *,
        history_attributes: Sequence[str],
        seeds: Sequence[int] | None = None,
    ) -> None:
        levels = torch.tensor(sigmas, dtype=torch.float32)
        # The sigmas are set afterwards: `set_timesteps(sigmas=...)` would apply the scheduler's own shift to them.
        scheduler.set_timesteps(len(sigmas) - 1)
        scheduler.sigmas = levels
        scheduler.timesteps = levels[:-1] * TRAIN_TIMESTEPS
        # With a begin index the scheduler counts its steps; otherwise it would search for the timestep by value.
        scheduler.set_begin_index(start_step)
        self._scheduler = scheduler
        self._timestep = scheduler.timesteps[start_step]
        self._history_attributes, self._start, self._seeds = tuple(history_attributes), start_step, seeds

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """See `Solver.step`."""
        drawn = {} if self._seeds is None else {"generator": self._generators(self._seeds)}
        after: torch.Tensor = self._scheduler.step(velocity, self._timestep, latents, return_dict=False, **drawn)[0]
        return after

    def _generators(self, seeds: Sequence[int]) -> list[torch.Generator]:
        """Return a new generator for each sample, so that a step repeated here or in another process draws the same."""
        index = self._scheduler.step_index
        step = self._start if index is None else index
        return [torch.Generator().manual_seed((seed + step) % SEED_COUNT) for seed in seeds]

    def copy(self) -> DiffusersSolver:
        """See `Solver.copy`."""
        # Shallow, except for lists: schedulers replace the tensors of their history, but shift its lists in place.
        other, other._scheduler = copy(self), copy(self._scheduler)
        for name, value in vars(self._scheduler).items():
            if isinstance(value, list):
                setattr(other._scheduler, name, list(value))
        return other

    def history(self) -> dict[str, Any]:
        """See `Solver.history`."""
        return {name: _copied(getattr(self._scheduler, name), torch.device("cpu")) for name in self._history_attributes}

    def restore(self, history: Mapping[str, Any], device: torch.device) -> None:
        """See `Solver.remember`."""
        for name in self._history_attributes:
            setattr(self._scheduler, name, _copied(history[name], device))


def _copied(value: Any, device: torch.device) -> Any:
    """Copy a value of a scheduler's history to `device`; 0-d tensors are timesteps and stay on the CPU."""
    if isinstance(value, list):
        return [_copied(each, device) for each in value]
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True) if value.ndim else value.clone()
    return value


def euler(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """Euler: first order, one straight line per step."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return DiffusersSolver(
        FlowMatchEulerDiscreteScheduler(), schedule.sigmas, start_step, history_attributes=("_step_index",)
    )


def unipc(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """UniPC of order 2 (bh2), configured as in the Wan pipelines of diffusers."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    # At a sigma of exactly 1 its log(1 - sigma) is infinite; diffusers steps down from 1 in the same way.
    sigmas = [min(sigma, HIGHEST_BELOW_ONE) for sigma in schedule.sigmas]
    return DiffusersSolver(
        scheduler,
        sigmas,
        start_step,
        history_attributes=(
            "_step_index",
            "model_outputs",
            "timestep_list",
            "last_sample",
            "lower_order_nums",
            "this_order",
        ),
    )


def dpm_plus_plus(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """DPM-Solver++ of order 2 (midpoint, multistep) on flow sigmas; the last step is of first order.

    So is the step after a sigma of exactly 1, whose log signal-to-noise ratio is infinite.
    """
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    history_attributes = ("_step_index", "model_outputs", "lower_order_nums")
    return DiffusersSolver(scheduler, schedule.sigmas, start_step, history_attributes=history_attributes)


def lcm(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """LCM: jump to the estimated end in every step, and add fresh noise of the next level.

    Raises:
        RequestError: there are no seeds.
    """
    if seeds is None:
        raise RequestError("the solver lcm draws noise in every step: give a seed for each sample")
    from diffusers import FlowMatchLCMScheduler

    scheduler = FlowMatchLCMScheduler()
    return DiffusersSolver(scheduler, schedule.sigmas, start_step, history_attributes=("_step_index",), seeds=seeds)


SOLVERS: Mapping[str, Callable[[Schedule, int, Sequence[int] | None], Solver]] = {
    "euler": euler,
    "unipc": unipc,
    "dpm++": dpm_plus_plus,
    "lcm": lcm,
}
"""Solver factories by name, called with the schedule, the first step, and a seed for each sample or None."""


def make_solver(name: str, schedule: Schedule, start_step: int = 0, *, seeds: Sequence[int] | None = None) -> Solver:
    """Return a new solver by name; `seeds`, one for each sample, are used by solvers that draw noise.

    Raises:
        RequestError: the name is unknown, or the solver needs seeds and there are none.
    """
    if name not in SOLVERS:
        raise RequestError(f"unknown solver {name!r}: choose one of {', '.join(SOLVERS)}")
    return SOLVERS[name](schedule, start_step, seeds)
