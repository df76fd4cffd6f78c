"""merge_requests: each sample is bit-equal to its own run, and unequal requests are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, merge_requests
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair

LAYERWISE = OffloadPolicy.layerwise(1)
SHAPE = (1, 16, 2, 4, 6)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lanes_of(make_request: Request, count: int, **changes: Any) -> list[DenoiseRequest]:
    """Return requests with different noise, texts and text lengths."""
    return [
        make_request(
            noise=normal(*SHAPE, seed=20 + number),
            positive=normal(1, 3 + number, 4096, seed=30 + number),
            negative=normal(1, 9 - number, 4096, seed=40 + number),
            **changes,
        )
        for number in range(count)
    ]


def latents_of(pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=LAYERWISE, device="cpu").latents


def check_apart(pair: ExpertPair, requests: list[DenoiseRequest]) -> None:
    together = latents_of(pair, merge_requests(requests)).split(
        [request.batch for request in requests]
    )
    for request, latents in zip(requests, together, strict=True):
        assert torch.equal(latents, latents_of(pair, request))
    for latents in together[1:]:
        assert not torch.equal(latents[:1], together[0][:1])


def test_lanes_of_a_solver_that_draws_noise_draw_their_own(
    open_pair: OpenPair, make_request: Request
) -> None:
    check_apart(open_pair(), lanes_of(make_request, 3, solver="lcm", guidance=(1.0, 1.0)))


@pytest.mark.parametrize(("solver", "guidance"), [("unipc", (1.0, 3.0)), ("euler", (4.0, 3.0))])
def test_lanes_with_texts_of_different_lengths_are_single_runs_to_the_bit(
    solver: str, guidance: tuple[float, float], open_pair: OpenPair, make_request: Request
) -> None:
    check_apart(open_pair(), lanes_of(make_request, 4, solver=solver, guidance=guidance))


@pytest.mark.slow  # several loop runs
def test_in_bf16_too(open_pair: OpenPair, make_request: Request) -> None:
    check_apart(open_pair(dtype=torch.bfloat16), lanes_of(make_request, 3))


@pytest.mark.slow  # several loop runs
def test_images_are_each_lanes_own(open_pair: OpenPair, make_request: Request) -> None:
    requests = [
        changed_request(request, image_condition=normal(1, 20, *SHAPE[2:], seed=50 + number))
        for number, request in enumerate(lanes_of(make_request, 3))
    ]
    check_apart(open_pair(in_channels=36), requests)


def test_latents_and_masks_are_each_lanes_own(open_pair: OpenPair, make_request: Request) -> None:
    masks = [torch.ones(1, 1, *SHAPE[2:]), torch.ones(1, 16, *SHAPE[2:])]
    masks[0][:, :, :1] = 0
    masks[1][:, 3, :, 2:] = 0.25
    requests = [
        changed_request(request, latent=normal(*SHAPE, seed=60 + number), mask=mask)
        for number, (request, mask) in enumerate(
            zip(lanes_of(make_request, 2, start_step=1), masks, strict=True)
        )
    ]
    check_apart(open_pair(), requests)


def test_a_latent_that_noise_was_left_in_goes_on(
    open_pair: OpenPair, make_request: Request
) -> None:
    requests = [
        changed_request(
            request, latent=normal(*SHAPE, seed=60 + number), add_noise=False, latent_sigma=sigma
        )
        for number, (request, sigma) in enumerate(
            zip(
                lanes_of(make_request, 2, sigmas=[0.75, 0.5, 0.0], steps=2, switch_step=1),
                (0.75, None),
                strict=True,
            )
        )
    ]
    check_apart(open_pair(), requests)


@pytest.mark.slow  # several loop runs
def test_a_lane_may_be_a_batch(open_pair: OpenPair, make_request: Request) -> None:
    one, three = lanes_of(make_request, 2)
    every = changed_request(
        three, noise=normal(3, *SHAPE[1:], seed=70), negative=normal(3, 5, 4096, seed=71)
    )
    check_apart(open_pair(), [one, every])
    together = merge_requests([one, every])
    assert together.batch == 4
    assert [len(text) for text in together.positive] == [1] * 4
    assert together.positive[1] is together.positive[3], (
        "a text for all samples of a lane is embedded once"
    )


@pytest.mark.slow  # several loop runs
def test_weights_move_once_for_all_lanes(open_pair: OpenPair, make_request: Request) -> None:
    requests = lanes_of(make_request, 4)

    def moved(request: DenoiseRequest) -> list[int]:
        with open_pair() as pair:
            timeline = denoise(pair, request, policy=LAYERWISE, device="cpu").timeline
        return [step.bytes_moved for step in timeline.steps]

    alone, together = [moved(request) for request in requests], moved(merge_requests(requests))
    assert together == alone[0]
    assert 4 * sum(together) == sum(map(sum, alone)) > 0


def test_one_alone_stays_what_it_is(make_request: Request) -> None:
    (request,) = lanes_of(make_request, 1)
    assert merge_requests([request]) is request


def test_joined_requests_can_be_joined(make_request: Request) -> None:
    first, second, third = lanes_of(make_request, 3)
    nested, flat = (
        merge_requests([merge_requests([first, second]), third]),
        merge_requests([first, second, third]),
    )
    assert torch.equal(nested.noise, flat.noise)
    for name in ("positive", "negative"):
        assert [*map(id, getattr(nested, name))] == [*map(id, getattr(flat, name))]


def test_a_negative_that_nothing_reads_may_be_missing_in_one(make_request: Request) -> None:
    first, second = lanes_of(make_request, 2, guidance=(1.0, 1.0))
    assert merge_requests([first, changed_request(second, negative=None)]).negative is None


def test_no_lanes_are_refused() -> None:
    with pytest.raises(RequestError, match="no lanes: give at least one"):
        merge_requests([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"noise": torch.zeros(1, 16, 3, 4, 6)},
            "lane 3 does not fit lane 1: size 48 x 32 pixels and 9 frames, in lane 1 48 x 32 "
            "pixels and 5 frames",
        ),
        (
            {"noise": torch.zeros(1, 16, 2, 6, 4)},
            "size 32 x 48 pixels and 5 frames, in lane 1 48 x 32",
        ),
        ({"steps": 6}, "steps 6, in lane 1 5. Lanes of one run .* run it separately"),
        ({"end_step": 4}, "steps 4, in lane 1 5"),
        ({"start_step": 1, "steps": 6, "latent": torch.zeros(SHAPE)}, "start step 1, in lane 1 0"),
        ({"switch_step": 3}, "expert of step 2 high, in lane 1 low"),
        ({"flow_shift": 8.0}, r"sigma before step 1 0\.\d+, in lane 1 0\.\d+"),
        ({"solver": "euler"}, "solver euler, in lane 1 unipc"),
        ({"guidance": (4.0, 1.0)}, r"guidance \(4.0, 1.0\), in lane 1 \(4.0, 3.0\)"),
        ({"latent": torch.zeros(SHAPE)}, "latent given, in lane 1 none"),
        ({"mask": torch.ones(1, 1, 2, 4, 6)}, "noise mask given, in lane 1 none"),
        ({"image_condition": torch.zeros(1, 20, 2, 4, 6)}, "start image given, in lane 1 none"),
    ],
)
def test_a_lane_that_does_not_fit_is_named_with_both_values(
    changes: dict[str, Any], message: str, make_request: Request
) -> None:
    first, second, third = lanes_of(make_request, 3)
    with pytest.raises(RequestError, match=message):
        merge_requests([first, second, changed_request(third, **changes)])


def test_a_latent_with_noise_in_it_does_not_join_one_that_gets_it_here(
    make_request: Request,
) -> None:
    late = {"sigmas": [0.75, 0.5, 0.0], "steps": 2, "switch_step": 1, "latent": torch.zeros(SHAPE)}
    first, second = lanes_of(make_request, 2, **late)
    with pytest.raises(RequestError, match="noise not added, in lane 1 added"):
        merge_requests([first, changed_request(second, add_noise=False)])


def test_steps_of_equal_sigmas_and_other_timesteps_are_others(make_request: Request) -> None:
    """The wan schedule truncates timesteps to integers. Explicit sigmas keep fractions."""
    first, second = lanes_of(make_request, 2)
    by_hand = changed_request(second, sigmas=first.step_plan.schedule.sigmas, steps=None)
    with pytest.raises(RequestError, match="timestep of step"):
        merge_requests([first, by_hand])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([torch.zeros(1, 5, 4096)], "positive has 1 texts for 2 samples: give one for each"),
        ([torch.zeros(1, 5, 4096)] * 3, "positive has 3 texts for 2 samples"),
        ([torch.zeros(1, 5, 4096), torch.zeros(1, 5, 768)], r"positive 2 of 2 is \[1, 5, 768\]"),
        (
            [torch.zeros(1, 5, 4096), torch.zeros(2, 5, 4096)],
            "positive 2 of 2 has 2 texts for 1 samples",
        ),
        ([torch.zeros(1, 0, 4096), torch.zeros(1, 5, 4096)], "positive 1 of 2 is .* no tokens"),
    ],
)
def test_texts_for_each_sample_are_checked_each(
    texts: list[torch.Tensor], message: str, make_request: Request
) -> None:
    with pytest.raises(RequestError, match=message):
        make_request(batch=2, positive=texts)
