"""Runs cut into parts and samplers equal the whole run, and runs under a mask."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from wanstream.sampling.inputs import DenoiseRequest, native_inputs, native_latent
from wanstream.sampling.steps import SOLVERS, DenoiseResult, RequestError, RunSlice, StepProgress
from wanstream.tests.support.sampling.runs import OpenPair, changed_request, latents_of, normal, run
from wanstream.tests.support.wan.pipelines import distance
from wanstream.wan.experts.open import open_experts

STEPS = 4
LATENT = normal(1, 16, 2, 4, 6, seed=20)
LEFT_HALF = (torch.arange(6) < 3).float().expand(1, 1, 2, 4, 6)
SOFT = torch.rand(1, 1, 2, 4, 6, generator=torch.Generator().manual_seed(21))


@pytest.fixture
def whole(open_short: OpenPair) -> Callable[[DenoiseRequest], list[StepProgress]]:
    """`whole(request)`: the progress after each step."""

    def steps(request: DenoiseRequest) -> list[StepProgress]:
        progress: list[StepProgress] = []
        run(open_short(), request, on_step=progress.append)
        return progress

    return steps


@pytest.mark.parametrize(
    "solver", [pytest.param(name, marks=[pytest.mark.slow] * (name != "unipc")) for name in SOLVERS]
)
def test_a_run_resumes_after_any_step_in_another_pair(solver, open_short, make_request, whole):
    request = make_request(guidance=(4.0, 1.0), solver=solver, steps=STEPS)
    progress = whole(request)
    states = [step.state() for step in progress]
    first = states[0].latents.clone()
    for step, state in zip(progress[:-1], states, strict=False):
        with open_short() as pair:
            after: list[StepProgress] = []
            ended = run(pair, request, part=RunSlice(resume=state), on_step=after.append)
        assert torch.equal(ended.latents, states[-1].latents)
        expected = [(done, STEPS) for done in range(step.done + 1, STEPS + 1)]
        assert [(each.done, each.total) for each in after] == expected
    assert torch.equal(states[0].latents, first), "a state is a copy that no later step changes"
    assert len({state.latents.data_ptr() for state in states}) == STEPS


@pytest.mark.parametrize("cut", [0, 3])
def test_a_cut_run_leaves_the_noise_of_its_step(cut, open_short, make_request, whole):
    request = make_request(solver="unipc", steps=STEPS)
    before = run(open_short(), request, part=RunSlice(until=cut))
    assert before.sigma == request.step_plan.schedule.sigmas[cut]
    assert [step.index for step in before.timeline.steps] == list(range(cut))
    if cut:
        assert torch.equal(before.latents, whole(request)[cut - 1].state().latents)


@pytest.mark.parametrize("expert", ["high", "low"])
def test_a_part_of_one_expert_needs_no_byte_of_the_other(
    expert, tiny_expert_folder, tmp_path, make_request, whole
):
    request = make_request(steps=2, switch_step=1)
    progress = whole(request)
    folders = {}
    for seed, name in ((1, "high"), (2, "low")):
        folders[name] = shutil.copytree(tiny_expert_folder(seed=seed, layers=2), tmp_path / name)
    part = RunSlice(until=1) if expert == "high" else RunSlice(resume=progress[0].state())
    with open_experts(folders["high"], folders["low"], compute_dtype=torch.float32) as pair:
        for file in folders["low" if expert == "high" else "high"].glob("*.safetensors"):
            os.truncate(file, 0)
        latents = run(pair, request, part=part).latents
    assert torch.equal(latents, progress[0 if expert == "high" else 1].state().latents)


def test_a_part_outside_the_run_is_refused(open_short, make_request, whole):
    request = make_request(steps=2, switch_step=1)
    state = whole(request)[0].state()
    for next_step, until in ((3, None), (0, 3), (2, 1), (0, -1)):
        part = RunSlice(resume=dataclasses.replace(state, next_step=next_step), until=until)
        with pytest.raises(RequestError, match="takes steps 0 to 2"):
            run(open_short(), request, part=part)


def _handed_on(result: DenoiseResult) -> dict[str, Any]:
    """Return the next run's arguments from the last one's LATENT."""
    latent = native_latent(result.latents, {}, sigma=result.sigma)
    inputs = native_inputs([[torch.zeros(1, 1, 4096), {}]], None, latent)
    return {"latent": inputs.latent, "latent_sigma": inputs.latent_sigma, "add_noise": False}


@pytest.mark.parametrize(("cuts", "schedule"), [((2,), "wan"), ((1, 2, 3, 4), "simple")])
def test_samplers_in_sequence_are_one_run(cuts, schedule, open_short, make_request):
    pair = open_short()
    plain = make_request(solver="euler", schedule=schedule)
    expected = run(pair, plain)
    given = dict[str, Any]()
    for start, end in pairwise((0, *cuts, 5)):
        part = {"start_step": start, "end_step": end, "leftover_noise": True}
        result = run(pair, changed_request(plain, **part, **given))
        assert [step.index for step in result.timeline.steps] == list(range(start, end))
        assert result.sigma == plain.step_plan.schedule.sigmas[end]
        given = _handed_on(result)
    assert expected.sigma == result.sigma == 0
    assert distance(result.latents, expected.latents) <= 1e-5


def test_sigmas_cut_by_hand_are_the_same_pieces(open_short, make_request):
    pair = open_short()
    settings = {"solver": "euler", "steps": None, "switch_step": None}
    sigmas = [1.0, 0.95, 0.9, 0.8, 0.5, 0.0]
    expected = latents_of(pair, make_request(**settings, sigmas=sigmas))
    high = run(pair, make_request(**settings, sigmas=sigmas[:3]))
    assert high.sigma == pytest.approx(0.9)
    low = run(pair, make_request(**settings, sigmas=sigmas[2:], **_handed_on(high)))
    assert [step.expert for step in low.timeline.steps] == ["high", "low", "low"]
    assert distance(low.latents, expected) <= 1e-5


@pytest.mark.parametrize("mask", [None, LEFT_HALF], ids=["no mask", "mask"])
def test_without_added_noise_the_noise_is_not_read(mask, open_short, make_request):
    """As in ComfyUI, a run without added noise keeps the masked latent with its own noise."""
    pair = open_short()
    given = {"start_step": 2, "add_noise": False, "latent": LATENT, "mask": mask}
    noises = torch.zeros_like(LATENT), torch.full_like(LATENT, float("nan"))
    ends = [latents_of(pair, make_request(noise=noise, **given)) for noise in noises]
    assert torch.equal(*ends)
    if mask is not None:
        assert torch.allclose(ends[0][..., 3:], LATENT[..., 3:], atol=1e-5)


def test_a_mask_keeps_the_given_latent_and_frees_the_rest(open_short, make_request):
    pair = open_short()
    latent = LATENT.repeat(2, 1, 1, 1, 1)
    plain = make_request(batch=2, latent=latent, start_step=1)
    masked = latents_of(pair, changed_request(plain, mask=LEFT_HALF))
    assert torch.allclose(masked[..., 3:], latent[..., 3:], atol=1e-5)
    assert not torch.allclose(masked[..., :3], latent[..., :3], atol=0.1)
    free = latents_of(pair, changed_request(plain, mask=torch.ones(1, 16, 2, 4, 6)))
    assert distance(free, latents_of(pair, plain)) <= 1e-5


@pytest.mark.parametrize(
    ("mask", "latent"),
    [(LEFT_HALF, None), (SOFT.repeat(1, 16, 1, 1, 1).cumprod(1), LATENT)],
    ids=["half", "soft"],
)
def test_a_masked_run_is_comfyuis_loop(mask, latent, open_short, plain_models, make_request):
    given = {"solver": "euler", "schedule": "simple", "guidance": (1.0, 1.0)}
    request = make_request(**given, mask=mask, latent=latent)
    models = plain_models(layers=2)
    kept = torch.zeros_like(LATENT) if latent is None else latent
    latents = noise = request.noise
    with torch.inference_mode():
        for step, (sigma, after) in enumerate(pairwise(request.step_plan.schedule.sigmas)):
            seen = latents * mask + (sigma * noise + (1 - sigma) * kept) * (1 - mask)
            model = models["high" if step < 2 else "low"]
            time = torch.tensor([sigma * 1000])
            end = seen - sigma * model(seen, time, request.positive, return_dict=False)[0]
            end = end * mask + kept * (1 - mask)
            latents = latents + (latents - end) / sigma * (after - sigma)
    assert distance(latents_of(open_short(), request), latents) <= 1e-5
