"""Guidance per step: lanes, refusals, and results that must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.distributed.driver.driver import stage_steps
from wanstream.nodes.runs.benchmark import describe_request
from wanstream.sampling import denoise, request_run_shape, run_digest
from wanstream.sampling.inputs import DenoiseRequest, merge_requests, split_request
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERWISE = OffloadPolicy.layerwise(1)
CPU = torch.device("cpu")

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def latents_of(pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=LAYERWISE, device="cpu").latents


def test_a_list_that_says_what_the_pair_says_changes_no_bit(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request()
    same = changed_request(request, guidance=(9.0, 9.0), guidance_steps=(4.0, 4.0, 3.0))
    assert torch.equal(latents_of(pair, same), latents_of(pair, request))


@pytest.mark.parametrize("scales", [(5.0, 1.0, 4.0, 3.0, 1.0), (1.0, 2.0)])
def test_every_step_has_its_own_scale(
    scales: tuple[float, ...],
    open_pair: OpenPair,
    plain_models: Any,
    plain_denoise: Any,
    make_request: Request,
) -> None:
    request = make_request(guidance_steps=scales)
    assert request.step_plan.guidance == (*scales, *scales[-1:] * (5 - len(scales)))
    assert torch.equal(latents_of(open_pair(), request), plain_denoise(plain_models(), request))


def test_a_run_that_starts_late_keeps_the_scales_of_its_steps(make_request: Request) -> None:
    late = make_request(
        guidance_steps=(6.0, 5.0, 4.0), start_step=1, end_step=4, latent=torch.zeros(1, 16, 2, 4, 6)
    )
    step_plan = late.step_plan
    assert [step_plan.guidance[step] for step in step_plan.steps] == [5.0, 4.0, 4.0]


def test_a_step_of_scale_one_computes_no_negative_lane(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, calls = open_pair(), list[str]()
    models = pair.engine(LAYERWISE, CPU).models
    for name in ("high", "low"):
        models[name].blocks[0].register_forward_hook(lambda *_, name=name: calls.append(name))
    denoise(
        pair, make_request(guidance_steps=(1.0, 4.0, 1.0, 3.0, 1.0)), policy=LAYERWISE, device="cpu"
    )
    assert calls == ["high"] * 3 + ["low"] * 4


def test_texts_that_a_late_step_needs_are_embedded_with_the_rest(
    open_pair: OpenPair, make_request: Request
) -> None:
    """The embedders are read once, as in a run guided from the first step on."""

    def non_block_bytes(scales: tuple[float, ...]) -> int:
        with open_pair() as pair:
            request = make_request(guidance_steps=scales)
            return denoise(pair, request, policy=LAYERWISE, device="cpu").timeline.non_block_bytes

    assert non_block_bytes((1.0, 1.0, 1.0, 1.0, 3.0)) == non_block_bytes((3.0,)) > 0


@pytest.mark.parametrize(
    ("scales", "lanes"),
    [
        ((4.0, 1.0), {"high": 2, "low": 1}),
        ((1.0, 1.0, 3.0), {"high": 1, "low": 2}),
        ((1.0,), {"high": 1, "low": 1}),
    ],
)
def test_the_planner_counts_the_most_lanes_of_each_expert(
    scales: tuple[float, ...], lanes: dict[str, int], open_pair: OpenPair, make_request: Request
) -> None:
    assert request_run_shape(open_pair(), make_request(guidance_steps=scales), CPU).lanes == lanes


def test_the_prediction_has_the_lanes_of_each_step(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair = open_pair()
    run = request_run_shape(pair, make_request(guidance_steps=(4.0, 1.0, 3.0, 1.0)), CPU)
    assert run.lanes == {"high": 2, "low": 2}
    assert [len(run.lane_tokens_of_step(step)) for step in range(5)] == [2, 1, 2, 1, 1]


def test_stages_are_cut_by_the_lanes_of_their_steps(make_request: Request) -> None:
    even = make_request(steps=8, switch_step=4, guidance_steps=(2.0, 2.0, 2.0, 2.0, 1.0))
    late = make_request(
        steps=8, switch_step=4, guidance_steps=(2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    )
    assert stage_steps(even, 3) == [range(2), range(2, 4), range(4, 8)]
    assert stage_steps(late, 3) == [range(4), range(4, 6), range(6, 8)]


def test_scales_go_with_the_parts_of_a_request_and_back(
    open_pair: OpenPair, make_request: Request
) -> None:
    request = make_request(batch=2, guidance_steps=(4.0, 1.0, 3.0))
    parts = split_request(request, [1, 1])
    assert [part.guidance_settings.steps for part in parts] == [request.guidance_settings.steps] * 2
    together = merge_requests(parts)
    assert together.step_plan == request.step_plan
    assert together.negative is not None


def test_requests_of_other_scales_are_not_joined(make_request: Request) -> None:
    first = make_request(guidance_steps=(4.0, 3.0))
    with pytest.raises(RequestError, match=r"guidance of step 1 2\.0, in lane 1 3\.0"):
        merge_requests([first, changed_request(first, guidance_steps=(4.0, 2.0))])


def test_a_list_of_ones_needs_no_negative(make_request: Request) -> None:
    request = make_request(guidance=(4.0, 3.0), guidance_steps=(1.0,), negative=None)
    assert not request.guidance_settings.guided


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"guidance_steps": ()},
            r"guidance_steps \(\): give a number for each step, the last one for the rest",
        ),
        (
            {"guidance_steps": (1.0, float("nan"))},
            "guidance_steps .*nan.*: give a number for each step",
        ),
        (
            {"guidance_steps": (1.0,) * 7},
            "guidance_steps has 7 numbers for 5 steps: remove the last 2",
        ),
        (
            {"guidance_steps": (1.0, 2.0), "negative": None},
            "needs a negative text: give one, or give guidance_steps",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str, make_request: Request) -> None:
    with pytest.raises(RequestError, match=message):
        make_request(**changes)


def test_a_report_says_the_scales_and_tells_requests_apart(make_request: Request) -> None:
    request = make_request(guidance_steps=(4.0, 1.5))
    assert describe_request(request)["Guidance"] == "4, 1.5, step by step"
    assert describe_request(make_request())["Guidance"] == "4 high-noise, 3 low-noise"
    assert run_digest(request, "") != run_digest(
        changed_request(request, guidance_steps=(4.0, 2.0)), ""
    )
