"""The loop compared with whole models, with other policies, and with its transfer program."""

from __future__ import annotations

import itertools

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.steps import NonFiniteLatentError, SamplingCancelled, StepProgress
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import save_expert_folder
from wanstream.tests.support.sampling.runs import LAYERWISE, block_calls, latents_of, normal, run
from wanstream.wan.experts.open import open_experts

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
POLICIES = [
    OffloadPolicy.resident(source="pinned"),
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(2, 1, source="pinned"),
    OffloadPolicy.block_swap(0, 3),
    OffloadPolicy.block_swap(LAYERS, 1),
]


def test_no_policy_changes_a_bit(open_pair, plain_models, plain_denoise, make_request):
    request = make_request(guidance=(4.0, 1.0))
    pair = open_pair()
    expected = plain_denoise(plain_models(), request)
    for policy in POLICIES:
        for _ in range(2):  # the second run starts from kept blocks
            assert torch.equal(latents_of(pair, request, policy), expected), policy


@pytest.mark.parametrize(("solver", "dtype"), [("euler", torch.float32), ("unipc", torch.bfloat16)])
def test_a_batch_is_the_textbook_loop_to_the_bit(
    solver, dtype, open_pair, plain_models, plain_denoise, make_request
):
    request = make_request(batch=2, solver=solver)
    before = request.noise.clone()
    latents = latents_of(open_pair(dtype=dtype, layers=2), request)
    assert torch.equal(latents, plain_denoise(plain_models(dtype=dtype, layers=2), request))
    assert torch.equal(request.noise, before), "the request is left alone"
    assert latents.dtype == torch.float32
    assert not latents.is_inference()


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_an_image_condition_is_the_textbook_loop_to_the_bit(
    open_pair, plain_models, plain_denoise, make_request
):
    request = make_request(batch=2, image_condition=normal(1, 20, 2, 4, 6, seed=13))
    expected = plain_denoise(plain_models(in_channels=36), request)
    assert torch.equal(latents_of(open_pair(in_channels=36), request), expected)


def test_starting_later_from_a_latent(open_pair, plain_models, plain_denoise, make_request):
    request = make_request(start_step=1, latent=normal(1, 16, 2, 4, 6, seed=14))
    result = run(open_pair(layers=2), request)
    assert torch.equal(result.latents, plain_denoise(plain_models(layers=2), request))
    assert [step.index for step in result.timeline.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", [{"start_step": 3}, {"schedule": "simple"}], ids=str)
def test_no_latent_is_an_empty_one(how, open_pair, make_request):
    pair = open_pair(layers=2)
    empty = torch.zeros(1, 16, 2, 4, 6)
    ends = [latents_of(pair, make_request(latent=latent, **how)) for latent in (None, empty)]
    assert torch.equal(*ends)


def test_guidance_of_one_computes_no_negative_lane(open_pair, make_request):
    pair = open_pair()
    calls = block_calls(pair)
    run(pair, make_request(guidance_steps=(1.0, 4.0, 1.0, 3.0, 1.0)))
    assert calls == ["high"] * 3 + ["low"] * 4
    unguided = make_request(guidance=(1.0, 1.0))
    without = make_request(guidance=(1.0, 1.0), negative=None)
    assert torch.equal(latents_of(pair, without), latents_of(pair, unguided))


def test_a_layerwise_step_moves_every_block_once(open_pair, make_request):
    pair = open_pair()
    request = make_request(batch=2)
    timeline = run(pair, request).timeline
    one_pass = LAYERS * pair.block_bytes.stored
    assert [step.bytes_moved for step in timeline.steps] == [one_pass] * 5
    assert [step.expert for step in timeline.steps] == ["high"] * 2 + ["low"] * 3
    assert tuple(step.sigma for step in timeline.steps) == request.step_plan.schedule.sigmas[:-1]
    assert timeline.kind == "measured"
    assert timeline.non_block_bytes > 0
    assert timeline.first_block_s is not None


def test_progress_is_reported_after_each_step(open_pair, make_request):
    progress = list[StepProgress]()
    result = run(open_pair(), make_request(solver="euler", start_step=1), on_step=progress.append)
    numbers = [(step.index, step.done, step.total) for step in progress]
    assert numbers == [(step, step, 4) for step in range(1, 5)]
    assert [step.record for step in progress] == list(result.timeline.steps)
    # Euler's last step ends where the estimate points.
    assert torch.equal(progress[-1].denoised, result.latents)


def test_a_cancel_between_blocks_leaves_the_pair_usable(open_pair, make_request):
    pair = open_pair()
    request = make_request()
    expected = latents_of(pair, request)
    for questions, step, block in ((1, 0, 0), (7, 1, 2), (9, 2, 0)):
        polls = itertools.count(1)
        with pytest.raises(SamplingCancelled) as caught:
            run(pair, request, should_stop=lambda: next(polls) == questions)  # noqa: B023
        assert (caught.value.step, caught.value.block) == (step, block)
    assert torch.equal(latents_of(pair, request), expected)


def test_nan_in_an_expert_names_its_first_step(
    make_tiny_expert, tiny_expert_folder, tmp_path, make_request
):
    broken = make_tiny_expert(seed=2)
    broken.proj_out.bias.data[0] = float("nan")
    save_expert_folder(broken, tmp_path, dtype=torch.float32)
    message = r"after step 2 \(low-noise expert, sigma 0\.\d+\)"
    with open_experts(tiny_expert_folder(seed=1), tmp_path, compute_dtype=torch.float32) as pair:
        with pytest.raises(NonFiniteLatentError, match=message):
            run(pair, make_request())
        run(pair, make_request(switch_step=5))


def test_unusable_policies_and_devices_are_refused(open_pair, make_request):
    with pytest.raises(ValueError, match="blocks_to_swap"):
        run(open_pair(), make_request(), OffloadPolicy.block_swap(LAYERS + 1))
    with pytest.raises(ValueError, match="meta is not supported"):
        denoise(open_pair(), make_request(), policy=LAYERWISE, device="meta")
