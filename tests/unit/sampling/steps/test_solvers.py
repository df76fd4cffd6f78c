"""Solvers compared with diffusers schedulers as the Wan pipelines use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)

from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.schedules import (
    Schedule,
    explicit_schedule,
    simple_schedule,
    wan_schedule,
)
from wanstream.sampling.steps.solvers import Solver

SHAPE = (2, 16, 2, 4, 6)
SEEDS = (5, 2**64 - 1)
"""One seed per sample. The last one is the largest, so the next step wraps to 0."""


def _velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    """Stand-in for the model: smooth, and different at every noise level."""
    return torch.sin(latents * (1 + sigma)) + sigma


def _run(
    solver: Solver,
    schedule: Schedule,
    latents: torch.Tensor,
    start: int = 0,
    end: int | None = None,
) -> torch.Tensor:
    for sigma in schedule.sigmas[start : schedule.steps if end is None else end]:
        latents = solver.step(_velocity(latents, sigma), latents)
    return latents


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 20])
def test_unipc_is_wan_pipelines_scheduler_to_the_bit(latents: torch.Tensor, steps: int) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    expected = latents
    for i, t in enumerate(scheduler.timesteps):
        expected = scheduler.step(
            _velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False
        )[0]

    schedule = wan_schedule(steps, 5.0)
    assert torch.equal(_run(Solver("unipc", schedule), schedule, latents), expected)


def test_euler_is_the_flow_match_scheduler_to_the_bit(latents: torch.Tensor) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(9)
    expected = latents
    for i, t in enumerate(scheduler.timesteps):
        expected = scheduler.step(
            _velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False
        )[0]

    schedule = explicit_schedule(scheduler.sigmas)
    assert torch.equal(_run(Solver("euler", schedule), schedule, latents), expected)


def test_euler_does_not_shift_the_sigmas_again(latents: torch.Tensor) -> None:
    schedule = simple_schedule(6, 8.0)
    expected = latents
    for here, after in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
        expected = expected + (torch.tensor(after) - torch.tensor(here)) * _velocity(expected, here)
    assert torch.equal(_run(Solver("euler", schedule), schedule, latents), expected)


@pytest.mark.parametrize("steps", [1, 2, 3, 16])
def test_dpm_plus_plus_is_the_multistep_scheduler_to_the_bit(
    latents: torch.Tensor, steps: int
) -> None:
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    schedule = explicit_schedule(scheduler.sigmas)
    expected = latents
    for sigma, t in zip(schedule.sigmas, scheduler.timesteps, strict=False):
        expected = scheduler.step(_velocity(expected, sigma), t, expected, return_dict=False)[0]
    assert torch.equal(_run(Solver("dpm++", schedule), schedule, latents), expected)


@pytest.mark.parametrize("solver", ["dpm++", "lcm"])
def test_a_first_sigma_of_one_leaves_no_infinity(latents: torch.Tensor, solver: str) -> None:
    schedule = simple_schedule(4, 5.0)
    assert schedule.sigmas[0] == 1.0
    ended = _run(Solver(solver, schedule, seeds=SEEDS), schedule, latents)
    nearly = explicit_schedule([1 - 1e-6, *schedule.sigmas[1:]])
    torch.testing.assert_close(
        ended, _run(Solver(solver, nearly, seeds=SEEDS), schedule, latents), rtol=1e-2, atol=1e-2
    )


def test_dpm_plus_plus_is_of_second_order() -> None:
    """On dx/ds = x it is more exact than first-order Euler, and gains more from more steps."""

    def error(solver: str, steps: int) -> float:
        schedule = explicit_schedule(torch.linspace(0.9, 0.1, steps + 1))
        state, rule = torch.full(SHAPE, 1.0), Solver(solver, schedule)
        for _ in range(steps):
            state = rule.step(state, state)
        return float((state - torch.tensor(-0.8).exp()).abs().max())

    assert error("dpm++", 8) < error("euler", 8)
    assert error("dpm++", 32) < error("dpm++", 8) / 8
    assert error("euler", 32) > error("euler", 8) / 8


def test_lcm_is_the_scheduler_with_the_noise_of_each_step(latents: torch.Tensor) -> None:
    schedule = simple_schedule(5, 5.0)
    scheduler = FlowMatchLCMScheduler()
    scheduler.set_timesteps(sigmas=list(schedule.sigmas[:-1]))
    scheduler.set_begin_index(0)
    expected = latents
    for step, sigma in enumerate(schedule.sigmas[:-1]):
        drawn = [torch.Generator().manual_seed((seed + step) % 2**64) for seed in SEEDS]
        velocity = _velocity(expected, sigma)
        (expected,) = scheduler.step(
            velocity, scheduler.timesteps[step], expected, generator=drawn, return_dict=False
        )
    assert torch.equal(_run(Solver("lcm", schedule, seeds=SEEDS), schedule, latents), expected)


def test_lcm_goes_to_the_estimated_end_and_back_up(latents: torch.Tensor) -> None:
    schedule = explicit_schedule([0.75, 0.5, 0.0])
    solver = Solver("lcm", schedule, seeds=SEEDS)
    velocity = _velocity(latents, 0.75)
    denoised = latents - 0.75 * velocity
    noise = (solver.step(velocity, latents) - 0.5 * denoised) / 0.5
    assert noise.std() == pytest.approx(1, abs=0.1)
    assert not torch.equal(noise[0], noise[1])
    torch.testing.assert_close(solver.step(velocity, latents), latents - 0.5 * velocity)


def test_lcm_without_seeds_is_refused() -> None:
    with pytest.raises(
        RequestError, match="lcm draws noise in every step: give a seed for each sample"
    ):
        Solver("lcm", simple_schedule(4, 5.0))


def test_lcm_draws_other_noise_in_every_step_and_the_same_when_it_is_taken_again(
    latents: torch.Tensor,
) -> None:
    schedule = explicit_schedule([0.75, 0.5, 0.25, 0.0])
    solver = Solver("lcm", schedule, seeds=SEEDS)
    again = solver.copy()
    nothing = torch.zeros_like(latents)
    first, second = solver.step(nothing, nothing) / 0.5, solver.step(nothing, nothing) / 0.25
    assert not torch.allclose(first, second)
    assert torch.equal(again.step(nothing, nothing) / 0.5, first)
    later = Solver("lcm", schedule, 1, seeds=SEEDS)
    assert torch.equal(later.step(nothing, nothing) / 0.25, second)


@pytest.mark.parametrize("solver", ["dpm++", "lcm"])
def test_history_is_all_that_a_cut_run_needs(latents: torch.Tensor, solver: str) -> None:
    schedule = simple_schedule(8, 5.0)
    whole = Solver(solver, schedule, seeds=SEEDS)
    middle = _run(whole, schedule, latents, end=3)
    other = Solver(solver, schedule, seeds=SEEDS)
    other.restore(whole.history(), torch.device("cpu"))
    assert torch.equal(
        _run(other, schedule, middle, start=3), _run(whole, schedule, middle, start=3)
    )


@pytest.mark.parametrize("solver", ["euler", "unipc", "dpm++"])
def test_a_sample_does_not_depend_on_its_batch(latents: torch.Tensor, solver: str) -> None:
    schedule = simple_schedule(8, 5.0)
    together = _run(Solver(solver, schedule), schedule, latents)
    alone = [_run(Solver(solver, schedule), schedule, sample[None]) for sample in latents]
    assert torch.equal(together, torch.cat(alone))


def test_a_sample_of_lcm_does_not_depend_on_its_batch(latents: torch.Tensor) -> None:
    schedule = simple_schedule(8, 5.0)
    together = _run(Solver("lcm", schedule, seeds=SEEDS), schedule, latents)
    for sample, seed, expected in zip(latents, SEEDS, together, strict=True):
        alone = _run(Solver("lcm", schedule, seeds=[seed]), schedule, sample[None])
        assert torch.equal(alone[0], expected)


def test_euler_has_no_history_so_a_run_can_be_cut_anywhere(latents: torch.Tensor) -> None:
    schedule = simple_schedule(8, 5.0)
    whole = _run(Solver("euler", schedule), schedule, latents)
    middle = _run(Solver("euler", schedule), schedule, latents, end=3)
    assert torch.equal(_run(Solver("euler", schedule, 3), schedule, middle, start=3), whole)


def test_unipc_starts_later_as_the_scheduler_does(latents: torch.Tensor) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    scheduler.set_timesteps(8)
    scheduler.set_begin_index(3)
    expected = latents
    for i, t in enumerate(scheduler.timesteps[3:], start=3):
        expected = scheduler.step(
            _velocity(expected, float(scheduler.sigmas[i])), t, expected, return_dict=False
        )[0]

    schedule = wan_schedule(8, 5.0)
    assert torch.equal(_run(Solver("unipc", schedule, 3), schedule, latents, start=3), expected)


def test_unipc_takes_a_first_sigma_of_one_as_the_scheduler_does(latents: torch.Tensor) -> None:
    schedule = simple_schedule(8, 5.0)
    assert schedule.sigmas[0] == 1.0
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    )
    scheduler.set_timesteps(sigmas=np.array(schedule.sigmas[:-1]))
    scheduler.set_begin_index(0)
    expected = latents
    for sigma, t in zip(schedule.sigmas, scheduler.timesteps, strict=False):
        expected = scheduler.step(_velocity(expected, sigma), t, expected, return_dict=False)[0]
    assert torch.equal(_run(Solver("unipc", schedule), schedule, latents), expected)
