"""Runs with tokens next to the video: Bernini's contexts, Fun Control's reference and condition."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from wanstream.sampling import LaneInputs, request_run_shape
from wanstream.sampling.inputs import ExtraTokens, merge_requests
from wanstream.sampling.inputs.extra_tokens import REFERENCE_KEY, native_tokens
from wanstream.sampling.loop.lanes import windows_at
from wanstream.sampling.loop.memory import extra_tokens_of
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.shapes import ContextWindows
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import (
    CPU,
    LAYERWISE,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.wan import Nag

CONTROL = {"in_channels": 52, "reference": True}
VIDEO_TOKENS = 12
IMAGE_TOKENS = 10
REFERENCE_TOKENS = 6
SOURCE = normal(1, 16, 2, 4, 6, seed=31)
IMAGE = normal(1, 16, 1, 4, 10, seed=32)
REFERENCE = normal(1, 16, 1, 4, 6, seed=33)
CONTEXT = ExtraTokens(context=(SOURCE, IMAGE))
OF_REFERENCE = ExtraTokens(reference=REFERENCE)
CONDITION = normal(1, 36, 2, 4, 6, seed=34)
CONTROLLED = {"image_condition": CONDITION, "tokens": OF_REFERENCE}
WINDOWS = ContextWindows(frames=3, overlap=1, shift_windows=False)

variants = pytest.mark.parametrize(
    ("shape", "changes"), [({}, {"tokens": CONTEXT}), (CONTROL, CONTROLLED)]
)
"""Expert shape and request changes of Bernini and of Fun Control."""


def test_no_context_is_text_to_video(short_pair, make_request):
    plain, none, some = (
        latents_of(short_pair, make_request(**each))
        for each in ({}, {"tokens": ExtraTokens()}, {"tokens": CONTEXT})
    )
    assert torch.equal(none, plain)
    assert difference(some, plain) > 0.01


@variants
def test_policies_change_no_bit_and_chunks_only_last_ones(shape, changes, open_short, make_request):
    pair = open_short(**shape)
    request = make_request(**changes, steps=2, switch_step=1)
    resident = latents_of(pair, request, OffloadPolicy.resident())
    for policy in (LAYERWISE, OffloadPolicy.block_swap(2)):
        assert torch.equal(latents_of(pair, request, policy), resident)
    chunked = latents_of(pair, request, replace(LAYERWISE, chunk_tokens=8))
    assert difference(chunked, resident) <= ROUNDING


def test_experts_without_its_convolution_ignore_a_reference(short_pair, make_request, caplog):
    tokens = ExtraTokens(reference=normal(1, 16, 1, 8, 8, seed=1))
    with caplog.at_level(logging.INFO, "wanstream.sampling"):
        given = latents_of(short_pair, make_request(tokens=tokens))
    assert any("reference_latents" in record.getMessage() for record in caplog.records)
    assert torch.equal(given, latents_of(short_pair, make_request()))


def test_requests_with_other_shapes_are_not_merged(make_request):
    def refused(one: ExtraTokens, other: ExtraTokens, message: str, **how: bool) -> None:
        with pytest.raises(RequestError, match=f"next to the video {message}"):
            merge_requests([make_request(tokens=one), make_request(tokens=other)], **how)

    one, image = (ExtraTokens(context=(each,)) for each in (SOURCE, IMAGE))
    refused(CONTEXT, one, "2 x 4 x 6 and 2 x 4 x 6, in lane 1 2 x 4 x 6, 1 x")
    refused(OF_REFERENCE, ExtraTokens(), "none and none, in lane 1 reference, 1 x 4 x 6")
    refused(one, image, "1 x 4 x 10", reads_reference=False)
    foreign = make_request(tokens=ExtraTokens(foreign_reference="a picture"))
    lanes = [make_request(tokens=OF_REFERENCE), make_request(), foreign]
    assert merge_requests(lanes, reads_reference=False).batch == 3, "ignored references differ"


def test_the_planner_and_the_memory_count_all_tokens(open_short, make_request):
    pair = open_short()
    request = make_request(tokens=CONTEXT)
    extra = VIDEO_TOKENS + IMAGE_TOKENS
    assert extra_tokens_of(pair, request) == (extra, extra)
    assert request_run_shape(pair, request, CPU).tokens == VIDEO_TOKENS + extra
    reference = make_request(tokens=OF_REFERENCE)
    assert extra_tokens_of(pair, reference) == (0, 0), "ignored"
    assert extra_tokens_of(open_short(**CONTROL), reference) == (REFERENCE_TOKENS,) * 2


def test_sides_with_other_tokens_are_counted_apart(short_pair, make_request):
    extra = VIDEO_TOKENS + IMAGE_TOKENS
    more = ExtraTokens(context=(SOURCE, IMAGE, IMAGE))
    equal, unequal = (make_request(tokens=CONTEXT, negative_tokens=own) for own in (CONTEXT, more))
    assert extra_tokens_of(short_pair, unequal) == (extra, extra + IMAGE_TOKENS)
    sides = (VIDEO_TOKENS + extra, VIDEO_TOKENS + extra + IMAGE_TOKENS)
    assert request_run_shape(short_pair, unequal, CPU).tokens == sides[1]
    assert request_run_shape(short_pair, unequal, CPU).tokens_of_sides == sides
    assert request_run_shape(short_pair, equal, CPU).tokens_of_sides == sides[:1]
    for nag in (None, Nag()):
        without = changed_request(unequal, guidance=(1.0, 1.0), nag=nag)
        assert extra_tokens_of(short_pair, without) == (extra,), "no negative lanes"
        assert request_run_shape(short_pair, without, CPU).tokens_of_sides == sides[:1]


def test_both_sides_share_one_copy_on_the_device(make_request):
    def contexts(**changes):
        request = make_request(tokens=CONTEXT, **changes)
        meta = torch.device("meta")
        lanes = LaneInputs(request, meta).lanes(request.noise.to(meta), (0, 1))
        return [lane.behind[0].latents for lane in lanes]

    positive, negative = contexts()
    assert positive.is_meta
    assert negative is positive
    positive, negative = contexts(negative_tokens=ExtraTokens(context=(IMAGE,)))
    assert [positive.shape, negative.shape] == [SOURCE.shape, IMAGE.shape]


def test_windows_cut_a_context_of_the_videos_length_alone(open_short, make_request):
    noise, source = (normal(1, 16, 5, 4, 6, seed=seed) for seed in (6, 7))
    shorter = normal(1, 16, 3, 4, 6, seed=6)
    tokens = ExtraTokens(context=(source, shorter, IMAGE))
    request = make_request(noise=noise, tokens=tokens, windows=WINDOWS)
    assert extra_tokens_of(open_short(), request) == (3 * 6 + 3 * 6 + IMAGE_TOKENS,) * 2
    lanes = LaneInputs(request, CPU).lanes(noise, (0, 1), windows=windows_at(request, 0))
    assert [lane.name.frames for lane in lanes] == [(0, 1, 2), (2, 3, 4)] * 2
    for lane in lanes:
        expected = (source[:, :, list(lane.name.frames)], shorter, IMAGE)
        assert all(map(torch.equal, (part.latents for part in lane.behind), expected))


def test_windows_begin_with_the_start_image(make_request):
    noise = normal(1, 16, 5, 4, 6, seed=1)
    condition = normal(1, 36, 5, 4, 6, seed=2)
    request = make_request(noise=noise, image_condition=condition, windows=WINDOWS)
    _, second = LaneInputs(request, CPU).lanes(noise, (0,), windows=windows_at(request, 0))
    assert second.name.frames == (2, 3, 4)
    state = torch.cat([noise, condition], dim=1)
    expected = state[:, :, 2:].clone()  # noise and control of its own frames
    expected[:, 32:, 0] = state[:, 32:, 0]  # mask and start image of the video
    assert torch.equal(second.latents, expected)


OF_48 = {"tokens": ExtraTokens(context=(normal(1, 48, 1, 4, 6, seed=1),))}
WIDER = ExtraTokens(reference=normal(1, 16, 1, 4, 8, seed=1))


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ({}, OF_48, "context 1 .* has 48 channels, and these"),
        (CONTROL, {**CONTROLLED, "tokens": CONTEXT}, "has 16 channels, and these experts take 52"),
        (CONTROL, {**CONTROLLED, "tokens": WIDER}, r"reference_latents\) .* \[1, 16, 1, 4, 6"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(shape, changes, message, open_short, make_request):
    with pytest.raises(RequestError, match=message):
        run(open_short(**shape), make_request(**changes))


OTHERS = {
    "a picture": torch.zeros(1, 16, 4, 6),
    "another model": torch.zeros(1, 128, 2, 2),
    "an odd size": torch.zeros(1, 16, 1, 5, 7),
}
"""`reference_latents` from graphs for several models."""


@pytest.mark.parametrize("latents", OTHERS.values(), ids=OTHERS)
def test_experts_refuse_a_reference_of_another_model(latents, open_short, make_request):
    given = native_tokens("positive", {REFERENCE_KEY: [REFERENCE, latents]})
    merge_requests([make_request(), make_request(tokens=given)], reads_reference=False)
    run(open_short(), make_request(tokens=given, steps=1, switch_step=1))
    with pytest.raises(RequestError, match=r"reference_latents"):
        run(open_short(**CONTROL), make_request(**{**CONTROLLED, "tokens": given}))


REPEATED = ExtraTokens(reference=REFERENCE.repeat(3, 1, 1, 1, 1))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (ExtraTokens(context=(SOURCE, SOURCE[0])), r"context 2 of positive is \[16, 2, 4, 6\]"),
        (REPEATED, r"the reference of positive is \[3, .* give \[1, C"),
        (ExtraTokens(context=(SOURCE.long(),)), "torch.int64"),
    ],
)
def test_tokens_that_make_no_request(tokens, message, make_request):
    with pytest.raises(RequestError, match=message):
        make_request(tokens=tokens)
