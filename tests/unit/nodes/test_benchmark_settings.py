"""Benchmark settings: trial times, request digests and request descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.bench import TrialTimes
from wanstream.nodes.runs.benchmark import (
    describe_request,
)
from wanstream.sampling import run_digest
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.sampling.steps import RequestError
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan.latents import tensor_digest

Request = Callable[..., DenoiseRequest]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"repeats": 0}, "0 repeats measure nothing: give 1 to 100"),
        ({"repeats": -1}, "-1 repeats measure nothing"),
        ({"repeats": 101}, "repeats is 101: give at most 100"),
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": 101}, "warmup is 101"),
        ({"cooldown_s": -1.0}, "cooldown_s is -1: give 0 to 3600 seconds"),
        ({"cooldown_s": 3601.0}, "cooldown_s is 3601"),
        ({"cooldown_s": float("nan")}, "cooldown_s is nan"),
        ({"cooldown_s": float("inf")}, "cooldown_s is inf"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrialTimes(**numbers)


def test_a_digest_tells_values_shapes_and_types_apart() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    different = [
        tensor + 1,
        tensor.view(3, 2),
        tensor.double(),
        tensor.bfloat16(),
        -tensor,
        torch.tensor(0.0),
    ]
    assert (
        tensor_digest(tensor)
        == tensor_digest(tensor.clone())
        == tensor_digest(tensor.t().contiguous().t())
    )
    assert len({tensor_digest(each) for each in (tensor, *different)}) == 7


def test_equal_requests_are_one_job(make_request: Request) -> None:
    first, same = make_request(), make_request()
    assert run_digest(first, "experts") == run_digest(same, "experts")
    others = [
        make_request(steps=6),
        make_request(guidance=(4.0, 3.5)),
        make_request(solver="euler"),
        make_request(noise=first.noise + 1),
        make_request(negative=first.negative + 1),
        make_request(sigmas=[1.0, 0.5, 0.3, 0.2, 0.1, 0.0]),
    ]
    jobs = {run_digest(request, "experts") for request in (first, *others)} | {
        run_digest(first, "other experts")
    }
    assert len(jobs) == len(others) + 2


def test_texts_of_lanes_count_one_by_one(make_request: Request) -> None:
    texts = [torch.ones(1, 3, 4096), torch.ones(1, 3, 4096)]
    texts[1][0, 1, 2000] = 2  # both print the same text
    one, same, other = (
        make_request(
            batch=2,
            positive=[texts[place].clone() for place in order],
            guidance=(1.0, 1.0),
            negative=None,
        )
        for order in ((0, 1), (0, 1), (1, 0))
    )
    assert run_digest(one, "experts") == run_digest(same, "experts") != run_digest(other, "experts")


def test_contexts_count_by_all_their_values(make_request: Request) -> None:
    one, other = torch.ones(1, 16, 5, 20, 20), torch.ones(1, 16, 5, 20, 20)
    other[0, 8, 2, 10, 10] = 2  # both print the same text
    contexts = [
        ExtraTokens(context=(one,)),
        ExtraTokens(context=(other,)),
        ExtraTokens(context=(one, other)),
    ]
    contexts.append(ExtraTokens(reference=other[:, :, :1], context=(one,)))
    requests = [make_request(tokens=tokens) for tokens in contexts]
    requests += [
        make_request(tokens=contexts[0], **more)
        for more in ({"negative_tokens": ExtraTokens()}, {"context_guidance": 1.5})
    ]
    digests = [run_digest(request, "experts") for request in requests]
    assert len(set(digests)) == len(requests)
    assert (
        run_digest(make_request(tokens=ExtraTokens(context=(one.clone(),))), "experts")
        == digests[0]
    )


def test_steps_are_replaced_where_they_can_be(make_request: Request) -> None:
    request = make_request()
    assert request.with_steps(None) is request
    assert len(request.with_steps(9).step_plan.steps) == 9
    assert request.steps == 5
    with pytest.raises(RequestError, match="switch step 2 of 1 steps"):
        request.with_steps(1)
    with pytest.raises(
        RequestError, match="3 steps were requested, but the run has its sigmas from another node"
    ):
        changed_request(request, steps=None, sigmas=[1.0, 0.5, 0.3, 0.0]).with_steps(3)


def test_a_request_is_told_in_words(make_request: Request) -> None:
    assert describe_request(make_request(batch=2)) == {
        "Size": "48x32, 5 frames",
        "Videos": "2",
        "Steps": "5: 2 high-noise, 3 low-noise",
        "Solver": "unipc",
        "Sigmas": "wan, flow shift 5",
        "Guidance": "4 high-noise, 3 low-noise",
    }
    context = ExtraTokens(context=(torch.ones(1, 16, 1, 4, 6),))
    assert (
        describe_request(make_request(tokens=context, context_guidance=1.5))["Context guidance"]
        == "1.5"
    )
    own = make_request(
        steps=None,
        sigmas=[1.0, 0.5, 0.0],
        switch_step=1,
        start_step=1,
        latent=torch.ones(1, 16, 2, 4, 6),
    )
    assert describe_request(own)["Sigmas"] == "from another node"
    assert describe_request(own)["Steps"] == "1: 0 high-noise, 1 low-noise"
