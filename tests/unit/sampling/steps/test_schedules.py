"""Schedules compared with ComfyUI's formula, diffusers' UniPC and a switch step table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from wanstream.plan.programs import split_at_boundary
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.schedules import (
    Schedule,
    explicit_schedule,
    make_schedule,
    simple_schedule,
    wan_schedule,
)

# First low-noise step at boundary 0.875 and 0.9, measured in ComfyUI 0.18.1 (`simple` behind
# ModelSamplingSD3) and in diffusers 0.42.1 (WanPipeline with UniPC). At shift 3 both boundaries are
# ties decided by float32.
SWITCH = {
    # (steps, shift): (simple, wan)
    (4, 3): ((2, 1), (2, 2)),
    (4, 5): ((2, 2), (2, 2)),
    (4, 8): ((3, 2), (3, 2)),
    (4, 12): ((3, 3), (3, 3)),
    (20, 3): ((6, 5), (7, 6)),
    (20, 5): ((9, 8), (9, 8)),
    (20, 8): ((11, 10), (11, 10)),
    (20, 12): ((13, 12), (13, 12)),
    (27, 3): ((9, 7), (9, 7)),
    (27, 5): ((12, 10), (12, 10)),
    (27, 8): ((15, 13), (15, 13)),
    (27, 12): ((18, 16), (18, 16)),
    (30, 3): ((9, 8), (10, 8)),
    (30, 5): ((13, 11), (13, 11)),
    (30, 8): ((17, 15), (17, 15)),
    (30, 12): ((19, 18), (19, 18)),
    (40, 3): ((12, 10), (13, 11)),
    (40, 5): ((17, 15), (17, 15)),
    (40, 8): ((22, 19), (22, 19)),
    (40, 12): ((26, 23), (26, 23)),
}
SHIFTS = (1.0, 2.5, 3.0, 5.0, 8.0, 12.0)


@pytest.mark.parametrize("name", ["simple", "wan"])
@pytest.mark.parametrize(("steps", "shift"), SWITCH)
def test_switch_step(steps: int, shift: int, name: str) -> None:
    timesteps = make_schedule(name, steps, shift).timesteps
    found = tuple(split_at_boundary(timesteps, boundary) for boundary in (0.875, 0.9))
    assert found == SWITCH[steps, shift][name == "wan"]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", [1, 2, 4, 20, 27, 38, 40, 76, 122, 1000])
def test_simple_is_comfyuis_to_the_bit(steps: int, shift: float) -> None:
    table = [np.float32(k) / np.float32(1000) for k in range(1, 1001)]
    one, s = np.float32(1), np.float32(shift)
    shifted = [s * u / (one + np.float32(shift - 1) * u) for u in table]
    expected = [float(shifted[-(1 + int(i * (1000 / steps)))]) for i in range(steps)] + [0.0]
    assert simple_schedule(steps, shift).sigmas == tuple(expected)


def test_simple_has_the_sigmas_seen_in_comfyui() -> None:
    seen = [1, 0.9935, 0.9863, 0.9784, 0.9697, 0.96, 0.9492, 0.9369, 0.9231, 0.9072, 0.8889, 0.8675]
    assert simple_schedule(20, 8).sigmas[:12] == pytest.approx(seen, abs=5e-5)
    assert simple_schedule(4, 5).sigmas == pytest.approx([1, 0.9375, 0.8333, 0.625, 0], abs=5e-5)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 20, 27, 30, 38, 40, 50, 100])
def test_wan_is_diffusers_unipc_to_the_bit(steps: int, shift: float) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(steps)
    ours = wan_schedule(steps, shift)
    assert ours.sigmas == tuple(scheduler.sigmas.tolist())
    assert ours.timesteps == tuple(scheduler.timesteps.tolist())


def test_explicit_sigmas_are_used_as_they_are() -> None:
    sigmas = (1.0, 0.75, 0.1, 0.0)
    rounded = tuple(torch.tensor(sigmas).tolist())
    expected = Schedule(sigmas=rounded, timesteps=(1000.0, 750.0, 1000 * rounded[2]))
    assert explicit_schedule(sigmas) == explicit_schedule(torch.tensor(sigmas)) == expected
    assert explicit_schedule(sigmas).steps == 3


def test_the_model_is_told_the_float32_timestep_of_comfyui() -> None:
    schedule = simple_schedule(20, 3)
    timesteps = torch.tensor(schedule.timesteps, dtype=torch.float32)
    assert torch.equal(timesteps, torch.tensor(schedule.sigmas[:-1]) * 1000)


@pytest.mark.parametrize("sigmas", [(1.0, 0.75, 0.5), (0.5, 0.25), (0.5, 0.0)])
def test_sigmas_may_start_late_and_end_early(sigmas: tuple[float, ...]) -> None:
    schedule = explicit_schedule(sigmas)
    assert schedule.sigmas == sigmas
    assert schedule.timesteps == tuple(1000 * sigma for sigma in sigmas[:-1])


@pytest.mark.parametrize(
    ("end_step", "leftover_noise", "sigmas"),
    [
        (1, False, (1.0, 0.0)),
        (1, True, (1.0, 0.75)),
        (2, False, (1.0, 0.75, 0.0)),
        (2, True, (1.0, 0.75, 0.5)),
        (3, False, (1.0, 0.75, 0.5, 0.25)),
        (3, True, (1.0, 0.75, 0.5, 0.25)),
        (9, False, (1.0, 0.75, 0.5, 0.25)),
    ],
)
def test_a_cut_schedule_ends_at_zero_unless_noise_is_left_over(
    end_step: int, leftover_noise: bool, sigmas: tuple[float, ...]
) -> None:
    """Sigmas with a last value above 0 are not changed."""
    cut = explicit_schedule([1.0, 0.75, 0.5, 0.25]).until(end_step, leftover_noise=leftover_noise)
    assert cut.sigmas == sigmas
    assert cut.timesteps == tuple(1000 * sigma for sigma in sigmas[:-1])


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([], "make no step"),
        ([0.0], "make no step"),
        ([1.0, 0.5, -0.1], "last sigma is -0.1: flow sigmas end at 0"),
        ([1.0, 0.5, 0.5, 0.0], "sigma 2 .* not below sigma 1"),
        ([1.0, 0.2, 0.5, 0.0], "sigma 2 .* not below sigma 1"),
        ([1.0, float("nan"), 0.0], "sigma 1 .* not below sigma 0"),
        ([14.6, 0.5, 0.0], "first sigma is 14.6"),
        ([-1.0, 0.0], "first sigma is -1"),
    ],
)
def test_sigmas_that_make_no_schedule(sigmas: list[float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        explicit_schedule(sigmas)


@pytest.mark.parametrize(
    ("name", "steps", "shift", "message"),
    [
        ("simple", 0, 5.0, "0 steps"),
        ("wan", -1, 5.0, "-1 steps"),
        ("wan", 1001, 5.0, "1001 steps"),
        ("wan", 4, 0.0, "flow shift 0"),
        ("simple", 4, float("inf"), "flow shift inf"),
        ("karras", 4, 5.0, "unknown schedule 'karras': choose one of simple, wan"),
    ],
)
def test_numbers_that_make_no_schedule(name: str, steps: int, shift: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_schedule(name, steps, shift)
