"""Solvers: the rule that turns a predicted velocity into the latent of the next step.

The arithmetic is diffusers'. A diffusers scheduler computes its own sigmas, and shifts any it is given once more, so a
solver sets it up for the right number of steps and then puts the run's sigmas in. One solver serves the whole run: its
history crosses the expert switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch

from ..plan import TRAIN_TIMESTEPS
from .errors import RequestError
from .schedules import HIGHEST_BELOW_ONE, Schedule

SEEDS = 2**64
"""How many seeds a generator knows."""


class Solver(Protocol):
    """The step rule of one run, called once per step in order."""

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The latents after the present step; both tensors float32, same shape, left as they are."""

    def copy(self) -> Solver:
        """Another one with the same history: steps of the one are none of the other."""

    def history(self) -> Mapping[str, Any]:
        """What it remembers of the steps so far: numbers, and tensors on the CPU, that nobody else changes."""

    def remember(self, history: Mapping[str, Any], device: torch.device) -> None:
        """Go on from the history of another one of the same name and schedule, with its latents on `device`."""


class DiffusersSolver:
    """A diffusers scheduler that follows the given sigmas (steps + 1 values) from step `start_step` on.

    `remembers` names the attributes in which it keeps what it needs of former steps. Where `seeds` are given, one for
    each sample, the scheduler draws noise in every step, on the CPU, from nothing but the seed and the step's number.
    """

    def __init__(
        self,
        scheduler: Any,
        sigmas: Sequence[float],
        start_step: int,
        *,
        remembers: Sequence[str],
        seeds: Sequence[int] | None = None,
    ) -> None:
        levels = torch.tensor(sigmas, dtype=torch.float32)
        scheduler.set_timesteps(len(sigmas) - 1)
        scheduler.sigmas = levels
        scheduler.timesteps = levels[:-1] * TRAIN_TIMESTEPS
        # A scheduler told where it begins counts its steps; otherwise it would look the first timestep up.
        scheduler.set_begin_index(start_step)
        self._scheduler = scheduler
        self._timestep = scheduler.timesteps[start_step]
        self._remembers, self._start, self._seeds = tuple(remembers), start_step, seeds

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """See `Solver.step`."""
        drawn = {} if self._seeds is None else {"generator": self._generators(self._seeds)}
        after: torch.Tensor = self._scheduler.step(velocity, self._timestep, latents, return_dict=False, **drawn)[0]
        return after

    def _generators(self, seeds: Sequence[int]) -> list[torch.Generator]:
        """For each sample one that has drawn nothing: a step that is taken again, or elsewhere, draws the same."""
        index = self._scheduler.step_index
        step = self._start if index is None else index
        return [torch.Generator().manual_seed((seed + step) % SEEDS) for seed in seeds]

    def copy(self) -> DiffusersSolver:
        """See `Solver.copy`. Schedulers replace the tensors of their history and shift the lists that hold them."""
        other, other._scheduler = copy(self), copy(self._scheduler)
        for name, value in vars(self._scheduler).items():
            if isinstance(value, list):
                setattr(other._scheduler, name, list(value))
        return other

    def history(self) -> dict[str, Any]:
        """See `Solver.history`."""
        return {name: _moved(getattr(self._scheduler, name), torch.device("cpu")) for name in self._remembers}

    def remember(self, history: Mapping[str, Any], device: torch.device) -> None:
        """See `Solver.remember`."""
        for name in self._remembers:
            setattr(self._scheduler, name, _moved(history[name], device))


def _moved(value: Any, device: torch.device) -> Any:
    """A copy of what a scheduler remembers, its samples on `device`; timesteps, 0-d, stay where tables are."""
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True) if value.ndim else value.clone()
    return value


def euler(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """First order: one straight line per step."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return DiffusersSolver(FlowMatchEulerDiscreteScheduler(), schedule.sigmas, start_step, remembers=("_step_index",))


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
        remembers=("_step_index", "model_outputs", "timestep_list", "last_sample", "lower_order_nums", "this_order"),
    )


def dpm_plus_plus(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """DPM-Solver++ of order 2 (midpoint), the multistep kind, on flow sigmas; the last step is of first order.

    So is the one behind a sigma of exactly 1: seen from there, what comes before lies infinitely far away.
    """
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    remembers = ("_step_index", "model_outputs", "lower_order_nums")
    return DiffusersSolver(scheduler, schedule.sigmas, start_step, remembers=remembers)


def lcm(schedule: Schedule, start_step: int, seeds: Sequence[int] | None) -> Solver:
    """Goes to the estimated end in every step, and back up to the next level with fresh noise.

    Raises `RequestError` without seeds.
    """
    if seeds is None:
        raise RequestError("the solver lcm draws noise in every step: give a seed for each sample")
    from diffusers import FlowMatchLCMScheduler

    scheduler = FlowMatchLCMScheduler()
    return DiffusersSolver(scheduler, schedule.sigmas, start_step, remembers=("_step_index",), seeds=seeds)


SOLVERS: Mapping[str, Callable[[Schedule, int, Sequence[int] | None], Solver]] = {
    "euler": euler,
    "unipc": unipc,
    "dpm++": dpm_plus_plus,
    "lcm": lcm,
}
"""Solvers by name: (schedule, first step, a seed for each sample or None) -> Solver."""


def make_solver(name: str, schedule: Schedule, start_step: int = 0, *, seeds: Sequence[int] | None = None) -> Solver:
    """A solver of that name with no history; `seeds`, one for each sample, are for those that draw noise.

    Raises `RequestError` for an unknown name, and for one that lacks seeds.
    """
    if name not in SOLVERS:
        raise RequestError(f"unknown solver {name!r}: choose one of {', '.join(SOLVERS)}")
    return SOLVERS[name](schedule, start_step, seeds)
