"""Guidance per step: lanes, refusals, and results that must not change."""

from __future__ import annotations

import pytest
import torch

from wanstream.distributed.driver.driver import stage_steps
from wanstream.sampling import request_run_shape
from wanstream.sampling.steps import RequestError
from wanstream.tests.support.sampling.runs import CPU, latents_of, run

pytestmark = pytest.mark.usefixtures("exact_blocks")


def test_every_step_has_its_own_scale(open_pair, plain_models, plain_denoise, make_request):
    request = make_request(guidance_steps=(5.0, 1.0, 4.0, 3.0))
    assert request.step_plan.guidance == (5.0, 1.0, 4.0, 3.0, 3.0)
    latents = latents_of(open_pair(layers=2), request)
    assert torch.equal(latents, plain_denoise(plain_models(layers=2), request))


def test_a_late_run_keeps_the_scales_of_its_steps(make_request):
    part = {"start_step": 1, "end_step": 4, "latent": torch.zeros(1, 16, 2, 4, 6)}
    step_plan = make_request(guidance_steps=(6.0, 5.0, 4.0), **part).step_plan
    assert [step_plan.guidance[step] for step in step_plan.steps] == [5.0, 4.0, 4.0]


def test_texts_of_late_steps_are_embedded_with_the_rest(open_pair, make_request):
    """The embedders are read once, as in a run guided from the first step on."""
    late, always = (
        run(open_pair(), make_request(guidance_steps=scales)).timeline.non_block_bytes
        for scales in ((1.0, 1.0, 1.0, 1.0, 3.0), (3.0,))
    )
    assert late == always > 0


@pytest.mark.parametrize(
    ("scales", "lanes", "of_steps"),
    [
        ((4.0, 1.0), {"high": 2, "low": 1}, [2, 1, 1, 1, 1]),
        ((1.0, 1.0, 3.0), {"high": 1, "low": 2}, [1, 1, 2, 2, 2]),
        ((4.0, 1.0, 3.0, 1.0), {"high": 2, "low": 2}, [2, 1, 2, 1, 1]),
        ((1.0,), {"high": 1, "low": 1}, [1] * 5),
    ],
)
def test_the_planner_knows_the_lanes_of_each_step(scales, lanes, of_steps, open_pair, make_request):
    shape = request_run_shape(open_pair(), make_request(guidance_steps=scales), CPU)
    assert shape.lanes == lanes
    assert [len(shape.lane_tokens_of_step(step)) for step in range(5)] == of_steps


def test_stages_are_cut_by_the_lanes_of_their_steps(make_request):
    def stages(*scales: float) -> list[range]:
        return stage_steps(make_request(steps=8, switch_step=4, guidance_steps=scales), 3)

    assert stages(2.0, 2.0, 2.0, 2.0, 1.0) == [range(2), range(2, 4), range(4, 8)]
    late = stages(2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    assert late == [range(4), range(4, 6), range(6, 8)]


def test_a_list_of_ones_needs_no_negative(make_request):
    request = make_request(guidance=(4.0, 3.0), guidance_steps=(1.0,), negative=None)
    assert not request.guidance_settings.guided


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_steps": ()}, r"\(\): give a number for each step, the last one for the rest"),
        ({"guidance_steps": (1.0, float("nan"))}, "guidance_steps .*nan.*: give a number for each"),
        ({"guidance_steps": (1.0,) * 7}, "has 7 numbers for 5 steps: remove the last 2"),
        ({"guidance_steps": (1.0, 2.0), "negative": None}, "give one, or give guidance_steps"),
    ],
)
def test_bad_input_is_refused(changes, message, make_request):
    with pytest.raises(RequestError, match=message):
        make_request(**changes)
