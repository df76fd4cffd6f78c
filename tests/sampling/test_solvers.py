"""Solvers against the diffusers schedulers as the Wan pipelines drive them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from wanstream.sampling import (
    RequestError,
    Schedule,
    Solver,
    explicit_schedule,
    make_solver,
    simple_schedule,
    wan_schedule,
)

SHAPE = (2, 16, 2, 4, 6)


def _velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    """Stands for the model: smooth, and different at every level."""
    return torch.sin(latents * (1 + sigma)) + sigma


def _run(
    solver: Solver, schedule: Schedule, latents: torch.Tensor, start: int = 0, end: int | None = None
) -> torch.Tensor:
    for sigma in schedule.sigmas[start : schedule.steps if end is None else end]:
        latents = solver.step(_velocity(latents, sigma), latents)
    return latents


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 20])
def test_unipc_is_wan_pipelines_scheduler_to_the_bit(latents: torch.Tensor, steps: int) -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    expected = latents
    for i, t in enumerate(scheduler.timesteps):
        expected = scheduler.step(_velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False)[0]

    schedule = wan_schedule(steps, 5.0)
    assert torch.equal(_run(make_solver("unipc", schedule), schedule, latents), expected)


def test_euler_is_the_flow_match_scheduler_to_the_bit(latents: torch.Tensor) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(9)
    expected = latents
    for i, t in enumerate(scheduler.timesteps):
        expected = scheduler.step(_velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False)[0]

    schedule = explicit_schedule(scheduler.sigmas)
    assert torch.equal(_run(make_solver("euler", schedule), schedule, latents), expected)


def test_euler_does_not_shift_the_sigmas_again(latents: torch.Tensor) -> None:
    schedule = simple_schedule(6, 8.0)
    expected = latents
    for here, after in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
        expected = expected + (torch.tensor(after) - torch.tensor(here)) * _velocity(expected, here)
    assert torch.equal(_run(make_solver("euler", schedule), schedule, latents), expected)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_a_sample_does_not_depend_on_its_batch(latents: torch.Tensor, solver: str) -> None:
    schedule = simple_schedule(8, 5.0)
    together = _run(make_solver(solver, schedule), schedule, latents)
    alone = [_run(make_solver(solver, schedule), schedule, sample[None]) for sample in latents]
    assert torch.equal(together, torch.cat(alone))


def test_euler_has_no_history_so_a_run_can_be_cut_anywhere(latents: torch.Tensor) -> None:
    schedule = simple_schedule(8, 5.0)
    whole = _run(make_solver("euler", schedule), schedule, latents)
    middle = _run(make_solver("euler", schedule), schedule, latents, end=3)
    assert torch.equal(_run(make_solver("euler", schedule, 3), schedule, middle, start=3), whole)


def test_unipc_starts_later_as_the_scheduler_does(latents: torch.Tensor) -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    scheduler.set_timesteps(8)
    scheduler.set_begin_index(3)
    expected = latents
    for i, t in enumerate(scheduler.timesteps[3:], start=3):
        expected = scheduler.step(_velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False)[0]

    schedule = wan_schedule(8, 5.0)
    assert torch.equal(_run(make_solver("unipc", schedule, 3), schedule, latents, start=3), expected)


def test_unipc_takes_a_first_sigma_of_one_as_the_scheduler_does(latents: torch.Tensor) -> None:
    schedule = simple_schedule(8, 5.0)
    assert schedule.sigmas[0] == 1.0
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    scheduler.set_timesteps(sigmas=np.array(schedule.sigmas[:-1]))
    scheduler.set_begin_index(0)
    expected = latents
    for sigma, t in zip(schedule.sigmas, scheduler.timesteps, strict=False):
        expected = scheduler.step(_velocity(expected, sigma), t, expected, return_dict=False)[0]
    assert torch.equal(_run(make_solver("unipc", schedule), schedule, latents), expected)


def test_unknown_solver() -> None:
    with pytest.raises(RequestError, match="unknown solver 'heun': choose one of euler, unipc"):
        make_solver("heun", simple_schedule(4, 5.0))
