"""A run interrupted between two steps and resumed elsewhere equals the whole run."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SOLVERS, RequestError, RunSlice, RunState, StepProgress
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

LAYERWISE = OffloadPolicy.layerwise(1)
STEPS = 6

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _run(
    pair: ExpertPair, request: DenoiseRequest, part: RunSlice
) -> tuple[torch.Tensor, list[StepProgress]]:
    progress: list[StepProgress] = []
    ended = denoise(pair, request, part, policy=LAYERWISE, device="cpu", on_step=progress.append)
    return ended.latents, progress


@pytest.fixture
def whole(
    open_pair: OpenPair, make_request: Request
) -> Callable[[DenoiseRequest], list[StepProgress]]:
    def run(request: DenoiseRequest) -> list[StepProgress]:
        progress: list[StepProgress] = []
        with open_pair() as pair:
            denoise(pair, request, policy=LAYERWISE, device="cpu", on_step=progress.append)
        return progress

    return run


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in sorted({*SOLVERS} - {"unipc"})]


@pytest.mark.parametrize("solver", ["unipc", *SLOW])
def test_a_run_goes_on_after_any_step_in_another_pair(
    solver: str, open_pair: OpenPair, make_request: Request, whole: Any
) -> None:
    request = make_request(guidance=(4.0, 1.0), solver=solver, steps=STEPS, switch_step=3)
    progress = whole(request)
    ended = progress[-1].state().latents
    for step in progress[:-1]:
        with open_pair() as pair:
            latents, after = _run(pair, request, RunSlice(resume=step.state()))
        assert torch.equal(latents, ended)
        assert [(each.done, each.total) for each in after] == [
            (n, STEPS) for n in range(step.done + 1, STEPS + 1)
        ]


@pytest.mark.parametrize("cut", [0, 1, 3, STEPS])
def test_a_run_that_is_cut_leaves_the_noise_of_its_step(
    cut: int, open_pair: OpenPair, make_request: Request, whole: Any
) -> None:
    request = make_request(solver="unipc", steps=STEPS, switch_step=3)
    progress = whole(request)
    with open_pair() as pair:
        before = denoise(pair, request, RunSlice(until=cut), policy=LAYERWISE, device="cpu")
    assert before.sigma == request.step_plan.schedule.sigmas[cut]
    assert [step.index for step in before.timeline.steps] == list(range(cut))
    if cut:
        assert torch.equal(before.latents, progress[cut - 1].state().latents)


@pytest.mark.parametrize("expert", ["high", "low"])
def test_a_part_of_one_expert_needs_no_byte_of_the_other(
    expert: str,
    tiny_expert_folder: Callable[..., Path],
    tmp_path: Path,
    make_request: Request,
    whole: Any,
) -> None:
    request = make_request(steps=STEPS, switch_step=3)
    state = whole(request)[2].state()
    folders = {}
    for seed, name in ((1, "high"), (2, "low")):
        folders[name] = tmp_path / name
        shutil.copytree(tiny_expert_folder(seed=seed), folders[name])
    with open_experts(folders["high"], folders["low"], compute_dtype=torch.float32) as pair:
        other = folders["low" if expert == "high" else "high"]
        for file in other.glob("*.safetensors"):
            os.truncate(file, 0)
        part = RunSlice(until=3) if expert == "high" else RunSlice(resume=state)
        latents, _ = _run(pair, request, part)
        again, _ = _run(pair, request, part)
    assert torch.equal(latents, again)
    assert expert == "low" or torch.equal(latents, state.latents)


def test_a_state_is_a_copy_that_no_later_step_changes(
    open_pair: OpenPair, make_request: Request
) -> None:
    states: list[RunState] = []
    with open_pair() as pair:
        request = make_request(solver="unipc", steps=STEPS)
        denoise(
            pair,
            request,
            policy=LAYERWISE,
            device="cpu",
            on_step=lambda step: states.append(step.state()),
        )
        first = states[0]
        kept = dataclasses.replace(first, latents=first.latents.clone())
        _run(pair, request, RunSlice(resume=first))
    assert torch.equal(first.latents, kept.latents)
    assert len({state.latents.data_ptr() for state in states}) == STEPS


@pytest.mark.parametrize(("next_step", "until"), [(7, None), (0, 7), (4, 3), (0, -1)])
def test_a_part_outside_the_course_is_refused(
    next_step: int, until: int | None, open_pair: OpenPair, make_request: Request, whole: Any
) -> None:
    request = make_request(steps=STEPS)
    state = dataclasses.replace(whole(request)[0].state(), next_step=next_step)
    with open_pair() as pair, pytest.raises(RequestError, match=f"takes steps 0 to {STEPS}"):
        _run(pair, request, RunSlice(resume=state, until=until))
