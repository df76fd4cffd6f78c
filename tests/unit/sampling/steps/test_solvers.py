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
from wanstream.sampling.steps.schedules import explicit_schedule, simple_schedule, wan_schedule
from wanstream.sampling.steps.solvers import Solver
from wanstream.tests.support.sampling.runs import CPU, normal

SEEDS = (5, 2**64 - 1)
"""One seed per sample. The last one is the largest, so the next step wraps to 0."""
LATENTS = normal(2, 16, 2, 4, 6, seed=0)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def _velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    """Stand-in for the model: smooth, and different at every noise level."""
    return torch.sin(latents * (1 + sigma)) + sigma


def _run(solver, schedule, latents=LATENTS, start=0, end=99):
    for sigma in schedule.sigmas[start : min(end, schedule.steps)]:
        latents = solver.step(_velocity(latents, sigma), latents)
    return latents


def _new(name: str, schedule, start: int = 0) -> Solver:
    return Solver(name, schedule, start, seeds=SEEDS)


def _scheduled(scheduler, schedule, start=0):
    """Return what diffusers' scheduler makes of the latents."""
    latents = LATENTS
    scheduler.set_begin_index(start)
    for step in range(start, schedule.steps):
        # Only LCM draws noise.
        drawn = [torch.Generator().manual_seed((seed + step) % 2**64) for seed in SEEDS]
        noise = {"generator": drawn} if isinstance(scheduler, FlowMatchLCMScheduler) else {}
        velocity = _velocity(latents, schedule.sigmas[step])
        time = scheduler.timesteps[step]
        latents = scheduler.step(velocity, time, latents, return_dict=False, **noise)[0]
    return latents


SHIFTED = {**FLOW, "flow_shift": 5.0}
SIMPLE = simple_schedule(8, 5.0)
"""It starts at a sigma of 1."""


@pytest.mark.parametrize(
    ("solver", "scheduler", "given", "start"),
    [
        *(("unipc", UniPCMultistepScheduler(**SHIFTED), steps, 0) for steps in (1, 3)),
        ("unipc", UniPCMultistepScheduler(**SHIFTED), 8, 3),
        ("unipc", UniPCMultistepScheduler(**FLOW), np.array(SIMPLE.sigmas[:-1]), 0),
        ("euler", FlowMatchEulerDiscreteScheduler(shift=5.0), 9, 0),
        *(("dpm++", DPMSolverMultistepScheduler(**SHIFTED), steps, 0) for steps in (1, 3, 16)),
        *(("lcm", FlowMatchLCMScheduler(), list(SIMPLE.sigmas[:-1]), start) for start in (0, 2)),
    ],
)
def test_steps_are_those_of_the_scheduler_to_the_bit(solver, scheduler, given, start):
    """A scheduler is given a number of steps, or our sigmas."""
    is_ours = not isinstance(given, int)
    scheduler.set_timesteps(**{"sigmas" if is_ours else "num_inference_steps": given})
    schedule = SIMPLE if is_ours else explicit_schedule(scheduler.sigmas)
    found = _run(_new(solver, schedule, start), schedule, start=start)
    assert torch.equal(found, _scheduled(scheduler, schedule, start))


def test_lcm_needs_a_seed_for_each_sample():
    with pytest.raises(RequestError, match="noise in every step: give a seed for each sample"):
        Solver("lcm", SIMPLE)


@pytest.mark.parametrize("solver", ["dpm++", "lcm"])
def test_a_first_sigma_of_one_leaves_no_infinity(solver):
    schedule = simple_schedule(4, 5.0)
    nearly = explicit_schedule([1 - 1e-6, *schedule.sigmas[1:]])
    ended, expected = (_run(_new(solver, each), schedule) for each in (schedule, nearly))
    torch.testing.assert_close(ended, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("solver", ["dpm++", "lcm", "euler"])
def test_history_is_all_that_a_cut_run_needs(solver):
    schedule = simple_schedule(8, 5.0)
    whole = _new(solver, schedule)
    other = _new(solver, schedule, 0 if solver != "euler" else 3)
    middle = _run(whole, schedule, end=3)
    other.restore(whole.history(), CPU)
    ended, expected = (_run(each, schedule, middle, start=3) for each in (other, whole))
    assert torch.equal(ended, expected)


@pytest.mark.parametrize("solver", ["euler", "unipc", "dpm++", "lcm"])
def test_a_sample_does_not_depend_on_its_batch(solver):
    schedule = simple_schedule(8, 5.0)
    together = _run(_new(solver, schedule), schedule)
    for sample, seed, expected in zip(LATENTS, SEEDS, together, strict=True):
        alone = _run(Solver(solver, schedule, seeds=[seed]), schedule, sample[None])
        assert torch.equal(alone[0], expected)


@pytest.mark.parametrize("name", ["unipc", "euler"])
def test_steps_of_a_copied_solver_leave_the_solver_alone(name):
    schedule = wan_schedule(6, 5.0)
    plain = _new(name, schedule)
    careful = _new(name, schedule)
    latents = [LATENTS, LATENTS]
    for seed in range(6):
        velocity = normal(*LATENTS.shape, seed=seed)
        careful.copy().step(velocity * 2, latents[1])  # a step that failed
        latents = [plain.step(velocity, latents[0]), careful.step(velocity, latents[1])]
        assert torch.equal(*latents)
