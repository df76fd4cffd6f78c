"""Schedules compared with ComfyUI's formula, diffusers' UniPC and a switch step table."""

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import split_at_boundary
from wanstream.sampling.steps import RequestError, seeded_noise
from wanstream.sampling.steps.schedules import (
    Schedule,
    explicit_schedule,
    make_schedule,
    partial_sigmas,
    schedule_sigmas,
    simple_schedule,
    step_seeds,
    wan_schedule,
)

# First low-noise step at boundary 0.875 and 0.9, measured in ComfyUI 0.18.1 (`simple` behind
# ModelSamplingSD3) and in diffusers 0.42.1 (WanPipeline with UniPC). At shift 3 both boundaries are
# ties decided by float32.
SWITCH = {
    # (steps, shift): (simple, wan)
    (4, 3): ((2, 1), (2, 2)),
    (4, 8): ((3, 2), (3, 2)),
    (20, 3): ((6, 5), (7, 6)),
    (20, 8): ((11, 10), (11, 10)),
    (30, 3): ((9, 8), (10, 8)),
    (40, 12): ((26, 23), (26, 23)),
}
SHAPE = (2, 16, 2, 4, 6)
SEEDS = [0, 7, 2**32 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("name", ["simple", "wan"])
@pytest.mark.parametrize(("steps", "shift"), SWITCH)
def test_switch_step(steps, shift, name):
    timesteps = make_schedule(name, steps, shift).timesteps
    found = tuple(split_at_boundary(timesteps, boundary) for boundary in (0.875, 0.9))
    assert found == SWITCH[steps, shift][name == "wan"]


@pytest.mark.parametrize("shift", [1.0, 2.5, 5.0, 12.0])
@pytest.mark.parametrize("steps", [1, 2, 20, 27, 122, 1000])
def test_simple_is_comfyuis_to_the_bit(steps, shift):
    table = [np.float32(k) / np.float32(1000) for k in range(1, 1001)]
    one = np.float32(1)
    s = np.float32(shift)
    shifted = [s * u / (one + np.float32(shift - 1) * u) for u in table]
    expected = [float(shifted[-(1 + int(i * (1000 / steps)))]) for i in range(steps)] + [0.0]
    schedule = simple_schedule(steps, shift)
    assert schedule.sigmas == tuple(expected)
    timesteps = torch.tensor(schedule.timesteps, dtype=torch.float32)
    assert torch.equal(timesteps, torch.tensor(schedule.sigmas[:-1]) * 1000)


@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 20, 38, 100])
def test_wan_is_diffusers_unipc_to_the_bit(steps, shift):
    how = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler = UniPCMultistepScheduler(**how, flow_shift=shift)
    scheduler.set_timesteps(steps)
    ours = wan_schedule(steps, shift)
    assert ours.sigmas == tuple(scheduler.sigmas.tolist())
    assert ours.timesteps == tuple(scheduler.timesteps.tolist())


@pytest.mark.parametrize("sigmas", [(1.0, 0.75, 0.1, 0.0), (1.0, 0.75, 0.5), (0.5, 0.25)])
def test_explicit_sigmas_are_used_as_they_are(sigmas):
    rounded = tuple(torch.tensor(sigmas).tolist())
    expected = Schedule(sigmas=rounded, timesteps=tuple(1000 * sigma for sigma in rounded[:-1]))
    assert explicit_schedule(sigmas) == explicit_schedule(torch.tensor(sigmas)) == expected
    assert expected.steps == len(sigmas) - 1


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
def test_a_cut_schedule_ends_at_zero_unless_noise_is_left(end_step, leftover_noise, sigmas):
    """Sigmas with a last value above 0 are not changed."""
    cut = explicit_schedule([1.0, 0.75, 0.5, 0.25]).until(end_step, leftover_noise=leftover_noise)
    assert cut.sigmas == sigmas
    assert cut.timesteps == tuple(1000 * sigma for sigma in sigmas[:-1])


@pytest.mark.parametrize(
    ("steps", "denoise", "total"),
    [(20, 1.0, 20), (20, 0.5, 40), (4, 0.3, 13), (1, 0.99, 1), (7, 0.7, 10)],
)
@pytest.mark.parametrize("name", ["simple", "wan"])
def test_denoise_takes_the_end_of_a_longer_schedule(name, steps, denoise, total):
    """As ComfyUI's BasicScheduler does."""
    whole = torch.tensor(make_schedule(name, total, 5.0).sigmas)
    part = schedule_sigmas(name, steps, denoise, 5.0)
    assert part.dtype == torch.float32
    assert torch.equal(part, whole[-(steps + 1) :])
    assert part[-1] == 0
    assert schedule_sigmas(name, steps, 0.0, 5.0).shape == (0,)


def test_a_schedule_may_be_shorter_than_asked_for():
    """Some ComfyUI schedules drop duplicate sigmas."""
    short = torch.tensor([1.0, 0.5, 0.0])
    assert torch.equal(partial_sigmas(lambda total: short, 20, 1.0), short)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (explicit_schedule, ([],), "make no step"),
        (explicit_schedule, ([1.0, 0.5, -0.1],), "last sigma is -0.1: flow sigmas end at 0"),
        (explicit_schedule, ([1.0, 0.2, 0.5, 0.0],), "sigma 2 .* not below sigma 1"),
        (explicit_schedule, ([1.0, float("nan"), 0.0],), "sigma 1 .* not below sigma 0"),
        (explicit_schedule, ([14.6, 0.5, 0.0],), "first sigma is 14.6"),
        (explicit_schedule, ([-1.0, 0.0],), "first sigma is -1"),
        (make_schedule, ("simple", 0, 5.0), "0 steps"),
        (make_schedule, ("wan", -1, 5.0), "-1 steps"),
        (make_schedule, ("wan", 1001, 5.0), "1001 steps"),
        (make_schedule, ("wan", 4, 0.0), "flow shift 0"),
        (make_schedule, ("karras", 4, 5.0), "unknown schedule 'karras': choose one of simple, wan"),
        (schedule_sigmas, ("simple", 20, 1.5, 5.0), "denoise 1.5: give 0"),
        (schedule_sigmas, ("simple", 20, float("nan"), 5.0), "denoise nan"),
        (schedule_sigmas, ("simple", 0, 1.0, 5.0), "0 steps: give 1 to 1000"),
        (schedule_sigmas, ("simple", 20, 0.01, 5.0), "2000 steps: give 1 to 1000"),
        (schedule_sigmas, ("simple", 20, 1.0, 0.0), "flow shift 0"),
    ],
)
def test_values_that_make_no_schedule(make, given, message):
    with pytest.raises(RequestError, match=message):
        make(*given)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(SEEDS))
def test_noise_is_that_of_the_global_generator(batch_index, seed):
    """As ComfyUI draws it, for each place in a batch. The generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draws = [torch.randn(1, 16, 1, 2, 2) for _ in range(max(batch_index) + 1)]
    before = torch.get_rng_state()
    shape = (len(batch_index), 16, 1, 2, 2)
    noise = seeded_noise(shape, seed, batch_index=batch_index)
    assert torch.equal(noise, torch.cat([draws[i] for i in batch_index]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        assert torch.equal(seeded_noise(shape, seed), torch.randn(shape))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch_index", [[0], [0, 1, 2], [0, -1]])
def test_a_batch_index_that_does_not_fit_is_refused(batch_index):
    with pytest.raises(RequestError, match="for 2 samples"):
        seeded_noise(SHAPE, 0, batch_index=batch_index)


def test_a_seed_on_the_way_is_the_samples_own():
    noise = seeded_noise(SHAPE, 0)
    latent = seeded_noise(SHAPE, 1)
    first, second = step_seeds(noise, None)
    assert first != second
    assert step_seeds(noise[1:]) == (second,), "whichever others it is computed with"
    assert step_seeds(noise) == (first, second), "every time"
    assert step_seeds(noise, latent)[0] != first
    without_noise = step_seeds(torch.zeros(SHAPE), latent)
    assert len(set(without_noise)) == 2, "a run that adds no noise starts from its latent"
    assert step_seeds(noise, latent.bfloat16()) == step_seeds(noise, latent.bfloat16().float())
