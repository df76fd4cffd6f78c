"""Runs with NAG: affected steps, cost, and results that must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.nodes.runs.benchmark import describe_request
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, merge_requests, split_request
from wanstream.sampling.steps import RequestError, SamplingCancelled, StepProgress
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag

LAYERWISE = OffloadPolicy.layerwise(1)
CPU = torch.device("cpu")
NAG = Nag(scale=5.0, tau=1.5, alpha=0.5)
UNGUIDED = (1.0, 1.0)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def latents_of(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE
) -> torch.Tensor:
    return denoise(pair, request, policy=policy, device="cpu").latents


def test_an_alpha_of_zero_is_a_run_without_it_to_the_bit(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair = open_pair()
    off, on = (make_request(guidance=UNGUIDED, nag=nag) for nag in (None, Nag(alpha=0.0)))
    assert torch.equal(latents_of(pair, on), latents_of(pair, off))


def test_it_changes_a_run_and_the_negative_text_matters(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(guidance=UNGUIDED, nag=NAG)
    other = changed_request(request, negative=-request.negative)
    ends = [latents_of(pair, each) for each in (changed_request(request, nag=None), request, other)]
    assert not torch.allclose(ends[0], ends[1], rtol=1e-3)
    assert not torch.allclose(ends[1], ends[2], rtol=1e-3)


def test_one_lane_does_the_work_and_no_byte_more_is_moved(
    open_pair: OpenPair, make_request: Request
) -> None:
    def cost(request: DenoiseRequest) -> tuple[int, list[int]]:
        calls = list[int]()
        with open_pair() as pair:
            for name in ("high", "low"):
                block = pair.engine(LAYERWISE, CPU).models[name].blocks[0]
                block.register_forward_hook(lambda *_: calls.append(1))
            timeline = denoise(pair, request, policy=LAYERWISE, device="cpu").timeline
        return len(calls), [step.bytes_moved for step in timeline.steps]

    off, on, guided = (
        cost(make_request(guidance=scales, nag=nag))
        for scales, nag in ((UNGUIDED, None), (UNGUIDED, NAG), ((4, 3), None))
    )
    assert on == off
    assert (on[0], guided[0]) == (5, 10)


def test_guided_steps_are_left_alone(open_pair: OpenPair, make_request: Request) -> None:
    def steps(**changes: Any) -> list[torch.Tensor]:
        progress: list[StepProgress] = []
        denoise(
            pair, make_request(**changes), policy=LAYERWISE, device="cpu", on_step=progress.append
        )
        return [step.denoised for step in progress]

    pair = open_pair()
    off, on = (steps(guidance=(4.0, 1.0), nag=nag) for nag in (None, NAG))
    assert [torch.equal(a, b) for a, b in zip(off, on, strict=True)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    of_steps = steps(guidance_steps=(4.0, 4.0, 1.0), nag=NAG)
    assert all(torch.equal(a, b) for a, b in zip(of_steps, on, strict=True))


def test_no_policy_changes_a_bit_and_chunks_only_the_last_ones(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(guidance=UNGUIDED, nag=NAG)
    expected = latents_of(pair, request)
    for policy in (OffloadPolicy.resident(source="pinned"), OffloadPolicy.block_swap(2, 1)):
        assert torch.equal(latents_of(pair, request, policy), expected)
    chunked = latents_of(pair, request, replace(LAYERWISE, chunk_tokens=5))
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-5)


def test_both_texts_are_embedded_before_the_first_step(
    open_pair: OpenPair, make_request: Request
) -> None:
    def non_block_bytes(**changes: Any) -> int:
        with open_pair() as pair:
            return denoise(
                pair, make_request(**changes), policy=LAYERWISE, device="cpu"
            ).timeline.non_block_bytes

    assert non_block_bytes(guidance=UNGUIDED, nag=NAG) == non_block_bytes(guidance=(4.0, 3.0)) > 0


def test_blocks_are_as_they_were_after_a_run_and_after_a_cancelled_one(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(guidance=UNGUIDED, nag=NAG)
    latents_of(pair, request)
    assert pair.engine(LAYERWISE, CPU).models.settings.nag is None
    polls = iter([False] * 6 + [True])
    with pytest.raises(SamplingCancelled):
        denoise(pair, request, policy=LAYERWISE, device="cpu", should_stop=lambda: next(polls))
    assert pair.engine(LAYERWISE, CPU).models.settings.nag is None


@pytest.mark.slow  # several loop runs
def test_samples_of_a_batch_are_single_runs_to_the_bit(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(batch=2, guidance=UNGUIDED, nag=NAG)
    together = latents_of(pair, request)
    parts = split_request(request, [1, 1])
    for part, sample in zip(parts, together, strict=True):
        assert torch.equal(latents_of(pair, part)[0], sample)
    assert torch.equal(latents_of(pair, merge_requests(parts)), together)
    with pytest.raises(RequestError, match="NAG None, in lane 1 Nag"):
        merge_requests([parts[0], changed_request(parts[1], nag=None)])


def test_windows_and_nag_go_together(open_pair: OpenPair, make_request: Request) -> None:
    pair = open_pair()
    whole = make_request(guidance=UNGUIDED, nag=NAG)
    one = changed_request(whole, windows=ContextWindows(frames=2, overlap=0))
    assert torch.equal(latents_of(pair, one), latents_of(pair, whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance": UNGUIDED, "negative": None}, "NAG needs a negative text"),
        ({"guidance": (4.0, 3.0)}, "NAG acts in steps of guidance 1, and this run has none"),
        ({"guidance": (4.0, 1.0), "end_step": 2}, "this run has none"),
        ({"guidance_steps": (1.0, 4.0), "start_step": 1}, "this run has none"),
    ],
)
def test_what_it_cannot_act_on_is_refused(
    changes: dict[str, Any], message: str, make_request: Request
) -> None:
    with pytest.raises(RequestError, match=message):
        make_request(nag=NAG, **changes)


def test_a_report_says_its_numbers(make_request: Request) -> None:
    words = describe_request(make_request(guidance=UNGUIDED, nag=NAG))
    assert words["NAG"] == "scale 5, tau 1.5, alpha 0.5, in steps of guidance 1"
