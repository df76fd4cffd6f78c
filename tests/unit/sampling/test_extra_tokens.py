"""Runs with tokens next to the video: Bernini's contexts, Fun Control's reference and condition."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import LaneInputs, denoise, request_run_shape, working_bytes
from wanstream.sampling.cache.settings import EasyCache, FirstBlockCache, MagCache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens, merge_requests, split_request
from wanstream.sampling.inputs.extra_tokens import REFERENCE_KEY, native_tokens
from wanstream.sampling.loop.lanes import windows_at
from wanstream.sampling.loop.memory import extra_tokens_of
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.shapes import ContextWindows
from wanstream.tests.support.rounding import ROUNDING
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag

LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = {
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(2),
    "chunked": replace(LAYERWISE, chunk_tokens=8),
}
CONTROL = {"in_channels": 52, "reference": True}
VIDEO_TOKENS, IMAGE_TOKENS, REFERENCE_TOKENS = 12, 10, 6

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SOURCE, IMAGE = _normal(1, 16, 2, 4, 6, seed=31), _normal(1, 16, 1, 4, 10, seed=32)
REFERENCE = _normal(1, 16, 1, 4, 6, seed=33)
CONTEXT = ExtraTokens(context=(SOURCE, IMAGE))
CONTROLLED: dict[str, Any] = {
    "image_condition": _normal(1, 36, 2, 4, 6, seed=34),
    "tokens": ExtraTokens(reference=REFERENCE),
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Bernini": ({}, {"tokens": CONTEXT}),
    "Fun Control": (CONTROL, CONTROLLED),
}
"""Expert shape and request changes."""


def run(pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE) -> Any:
    return denoise(pair, request, policy=policy, device="cpu")


def _differ(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_no_context_is_text_to_video(open_pair: OpenPair, make_request: Request) -> None:
    pair = open_pair()
    plain = run(pair, make_request()).latents
    assert torch.equal(run(pair, make_request(tokens=ExtraTokens())).latents, plain)
    assert _differ(run(pair, make_request(tokens=CONTEXT)).latents, plain) > 0.01


@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "policy", [POLICIES["layerwise"], POLICIES["block swap"]], ids=["layerwise", "block swap"]
)
def test_streamed_equals_resident(
    open_pair: OpenPair,
    make_request: Request,
    shape: dict[str, Any],
    changes: dict[str, Any],
    policy: OffloadPolicy,
) -> None:
    pair, request = open_pair(**shape), make_request(**changes)
    resident = run(pair, request, OffloadPolicy.resident()).latents
    assert torch.equal(run(pair, request, policy).latents, resident)


@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_chunks_of_tokens_are_parts_of_all_of_them(
    open_pair: OpenPair, make_request: Request, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    pair, request = open_pair(**shape), make_request(**changes)
    chunked = run(pair, request, POLICIES["chunked"]).latents
    assert _differ(chunked, run(pair, request).latents) <= ROUNDING


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_every_part_is_read(
    open_pair: OpenPair, make_request: Request, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    pair, request = open_pair(**shape), make_request(**changes)
    whole = run(pair, request).latents
    tokens = request.inputs.tokens
    less = [replace(tokens, reference=None)] if tokens.reference is not None else []
    less += [
        replace(tokens, context=tokens.context[:at] + tokens.context[at + 1 :])
        for at in range(len(tokens.context))
    ]
    less.append(
        replace(tokens, context=tokens.context[::-1])
        if tokens.context
        else ExtraTokens(reference=-REFERENCE)
    )
    for each in less:
        assert _differ(run(pair, changed_request(request, tokens=each)).latents, whole) > 0.001
    negative = run(pair, changed_request(request, negative_tokens=less[0])).latents
    assert _differ(negative, whole) > 0.001
    assert _differ(negative, run(pair, changed_request(request, tokens=less[0])).latents) > 0.001


def test_a_reference_is_ignored_by_experts_without_its_convolution(
    open_pair: OpenPair, make_request: Request, caplog: pytest.LogCaptureFixture
) -> None:
    pair, tokens = open_pair(), ExtraTokens(reference=_normal(1, 16, 1, 8, 8, seed=1))
    with caplog.at_level(logging.INFO, "wanstream.sampling"):
        given = run(pair, make_request(tokens=tokens)).latents
    assert any("reference_latents" in record.getMessage() for record in caplog.records)
    assert torch.equal(given, run(pair, make_request()).latents)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_samples_of_a_batch_equal_single_runs(
    open_pair: OpenPair, make_request: Request, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    pair, condition = open_pair(**shape), changes.get("image_condition")
    both = ExtraTokens(
        reference=None if condition is None else torch.cat([REFERENCE, -REFERENCE]),
        context=() if condition is not None else (torch.cat([SOURCE, -SOURCE]), IMAGE),
    )
    request = make_request(batch=2, image_condition=condition, tokens=both)
    expected = run(pair, request).latents
    parts = split_request(request, [1, 1])
    assert [len(latents) for latents in parts[1].inputs.tokens.tensors] == [1] * len(both.tensors)
    for sample, part in enumerate(parts):
        assert torch.equal(run(pair, part).latents, expected[sample : sample + 1])
    assert torch.equal(run(pair, merge_requests(parts)).latents, expected)


def test_requests_with_other_shapes_are_not_merged(make_request: Request) -> None:
    one, other = make_request(tokens=CONTEXT), make_request(tokens=ExtraTokens(context=(SOURCE,)))
    with pytest.raises(
        RequestError, match="next to the video 2 x 4 x 6 and 2 x 4 x 6, in lane 1 2 x 4 x 6, 1 x"
    ):
        merge_requests([one, other])


@pytest.mark.slow  # several loop runs
def test_ignored_references_keep_no_requests_apart(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair = open_pair()
    with_one, without = (
        make_request(tokens=ExtraTokens(reference=REFERENCE)),
        make_request(noise=-SOURCE),
    )
    foreign = changed_request(without, tokens=ExtraTokens(foreign_reference="a picture"))
    merged = merge_requests([with_one, without, foreign], reads_reference=pair.reads_reference)
    expected = [run(pair, request).latents for request in (with_one, without, without)]
    assert torch.equal(run(pair, merged).latents, torch.cat(expected))
    with pytest.raises(
        RequestError, match="next to the video none and none, in lane 1 reference, 1 x 4 x 6"
    ):
        merge_requests([with_one, without])
    contexts = [make_request(tokens=ExtraTokens(context=(each,))) for each in (SOURCE, IMAGE)]
    with pytest.raises(RequestError, match="next to the video 1 x 4 x 10"):
        merge_requests(contexts, reads_reference=False)


def test_the_planner_and_the_memory_count_all_tokens(
    open_pair: OpenPair, make_request: Request
) -> None:
    pair, request = open_pair(), make_request(tokens=CONTEXT)
    extra = VIDEO_TOKENS + IMAGE_TOKENS
    assert extra_tokens_of(pair, request) == (extra, extra)
    cpu = torch.device("cpu")
    assert request_run_shape(pair, request, cpu).tokens == VIDEO_TOKENS + extra
    shape = request.computed_shape
    longer = (*shape[:2], shape[2] * 3, *shape[3:])
    needs = working_bytes(pair, shape, sides=(2 * VIDEO_TOKENS,) * 2)
    assert needs == working_bytes(pair, longer, sides=(0, 0))
    reference = make_request(tokens=ExtraTokens(reference=REFERENCE))
    assert extra_tokens_of(pair, reference) == (0, 0), "ignored"
    assert extra_tokens_of(open_pair(**CONTROL), reference) == (REFERENCE_TOKENS,) * 2
    unequal = make_request(
        tokens=CONTEXT, negative_tokens=ExtraTokens(context=(SOURCE, IMAGE, IMAGE))
    )
    assert extra_tokens_of(pair, unequal) == (extra, extra + IMAGE_TOKENS)
    more = VIDEO_TOKENS + extra + IMAGE_TOKENS
    assert request_run_shape(pair, unequal, cpu).tokens == more
    assert request_run_shape(pair, unequal, cpu).tokens_of_sides == (more - IMAGE_TOKENS, more)
    assert request_run_shape(pair, request, cpu).tokens_of_sides == (more - IMAGE_TOKENS,)
    for nag in (None, Nag()):
        without = changed_request(unequal, guidance=(1.0, 1.0), nag=nag)
        assert extra_tokens_of(pair, without) == (extra,), "no negative lanes"
        assert request_run_shape(pair, without, cpu).tokens_of_sides == (VIDEO_TOKENS + extra,)


def test_both_sides_share_one_copy_on_the_device(make_request: Request) -> None:
    def contexts(**changes: Any) -> list[torch.Tensor]:
        request, meta = make_request(tokens=CONTEXT, **changes), torch.device("meta")
        lanes = LaneInputs(request, meta).lanes(request.noise.to(meta), (0, 1))
        return [lane.behind[0].latents for lane in lanes]

    positive, negative = contexts()
    assert positive.is_meta
    assert negative is positive
    positive, negative = contexts(negative_tokens=ExtraTokens(context=(IMAGE,)))
    assert [positive.shape, negative.shape] == [SOURCE.shape, IMAGE.shape]


def test_windows_cut_a_context_of_the_videos_length_alone(
    open_pair: OpenPair, make_request: Request
) -> None:
    noise = _normal(1, 16, 5, 4, 6, seed=1)
    source, shorter = _normal(1, 16, 5, 4, 6, seed=2), _normal(1, 16, 3, 4, 6, seed=3)
    windows = ContextWindows(frames=3, overlap=1, shift_windows=False)
    request = make_request(
        noise=noise, tokens=ExtraTokens(context=(source, shorter, IMAGE)), windows=windows
    )
    assert extra_tokens_of(open_pair(), request) == (3 * 6 + 3 * 6 + IMAGE_TOKENS,) * 2
    inputs = LaneInputs(request, torch.device("cpu"))
    lanes = inputs.lanes(noise, (0, 1), windows=windows_at(request, 0))
    assert [lane.name.frames for lane in lanes] == [(0, 1, 2), (2, 3, 4)] * 2
    for lane in lanes:
        cut, whole, image = (part.latents for part in lane.behind)
        assert torch.equal(cut, source[:, :, list(lane.name.frames)])
        assert torch.equal(whole, shorter)
        assert torch.equal(image, IMAGE)


def test_windows_begin_with_the_start_image_and_not_with_the_control(make_request: Request) -> None:
    noise, condition = _normal(1, 16, 5, 4, 6, seed=1), _normal(1, 36, 5, 4, 6, seed=2)
    windows = ContextWindows(frames=3, overlap=1, shift_windows=False)
    request = make_request(noise=noise, image_condition=condition, windows=windows)
    inputs = LaneInputs(request, torch.device("cpu"))
    _, second = inputs.lanes(noise, (0,), windows=windows_at(request, 0))
    assert second.name.frames == (2, 3, 4)
    state = torch.cat([noise, condition], dim=1)
    assert torch.equal(second.latents[:, :, 1:], state[:, :, 3:])
    assert torch.equal(second.latents[:, :32, 0], state[:, :32, 2]), (
        "noise and control of its own frames"
    )
    assert torch.equal(second.latents[:, 32:, 0], state[:, 32:, 0]), (
        "mask and start image of the video"
    )


CACHES = {
    "first block": FirstBlockCache(threshold=1e9),
    "easycache": EasyCache(threshold=1e9),
}


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_a_cache_skips_steps_with_all_their_tokens(
    open_pair: OpenPair,
    make_request: Request,
    shape: dict[str, Any],
    changes: dict[str, Any],
    cache: Any,
) -> None:
    pair, request = open_pair(**shape), make_request(steps=8, switch_step=4, cache=cache, **changes)
    result = run(pair, request)
    assert any(step.skipped_visits for step in result.timeline.steps)
    assert result.latents.isfinite().all()
    never = run(pair, changed_request(request, cache=replace(cache, threshold=0.0)))
    assert torch.equal(never.latents, run(pair, changed_request(request, cache=None)).latents)


@pytest.mark.slow  # several loop runs
def test_magcache_measures_and_skips(open_pair: OpenPair, make_request: Request) -> None:
    pair, request = open_pair(), make_request(steps=8, switch_step=4, tokens=CONTEXT)
    table = calibrate(request, lambda calibrated: run(pair, calibrated), source="test")
    rule = SkipRule(threshold=1e9, max_consecutive_skips=1, retention=0.25)
    result = run(pair, changed_request(request, cache=MagCache(table=table, rule=rule)))
    assert any(step.skipped_visits for step in result.timeline.steps)
    assert _differ(result.latents, run(pair, request).latents) < 1


CASES = [
    (
        {},
        {"tokens": ExtraTokens(context=(_normal(1, 48, 1, 4, 6, seed=1),))},
        "context 1 .* has 48 channels, and these",
    ),
    (
        CONTROL,
        {**CONTROLLED, "tokens": CONTEXT},
        "context 1 .* has 16 channels, and these experts take 52",
    ),
    (
        CONTROL,
        {**CONTROLLED, "tokens": ExtraTokens(reference=_normal(1, 16, 1, 4, 8, seed=1))},
        r"reference_latents\) is a latent of \[1, 16, 1, 4, 8\], .* takes \[1, 16, 1, 4, 6\]",
    ),
    (
        {},
        CONTROLLED,
        "text-to-video experts, and the conditioning of Wan2.2 Fun Control .*concat_mask_index.* "
        "remove its",
    ),
    (
        {"in_channels": 36},
        CONTROLLED,
        "image-to-video experts, and the conditioning of Wan2.2 Fun Control is connected",
    ),
    (
        {"in_channels": 36},
        {"image_condition": _normal(1, 32, 2, 4, 6, seed=1)},
        r"conditioning of Wan2.1 Fun Control is connected \(concat_latent_image of two latents\): "
        r"remove its node",
    ),
    (
        CONTROL,
        {"image_condition": _normal(1, 20, 2, 4, 6, seed=1)},
        "Wan2.2 Fun Control experts, and only a start image",
    ),
    (
        CONTROL,
        {},
        "these are Wan2.2 Fun Control experts, and no control video is connected: .* WanStream Fun "
        "Control",
    ),
]


@pytest.mark.parametrize(("shape", "changes", "message"), CASES)
def test_what_does_not_fit_the_experts_is_refused(
    open_pair: OpenPair,
    make_request: Request,
    shape: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(RequestError, match=message):
        run(open_pair(**shape), make_request(**changes))


OTHERS = {
    "a picture": torch.zeros(1, 16, 4, 6),
    "another model": torch.zeros(1, 128, 2, 2),
    "an odd size": torch.zeros(1, 16, 1, 5, 7),
}
"""`reference_latents` from graphs for several models."""


@pytest.mark.parametrize("latents", OTHERS.values(), ids=OTHERS)
def test_a_reference_of_another_model_is_refused_only_by_experts_that_read_it(
    open_pair: OpenPair, make_request: Request, latents: torch.Tensor
) -> None:
    given = native_tokens("positive", {REFERENCE_KEY: [REFERENCE, latents]})
    plain = run(open_pair(), make_request()).latents
    assert torch.equal(run(open_pair(), make_request(tokens=given)).latents, plain)
    with pytest.raises(RequestError, match=r"reference_latents"):
        run(open_pair(**CONTROL), make_request(**{**CONTROLLED, "tokens": given}))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (ExtraTokens(context=(SOURCE, SOURCE[0])), r"context 2 of positive is \[16, 2, 4, 6\]"),
        (
            ExtraTokens(reference=REFERENCE.repeat(3, 1, 1, 1, 1)),
            r"the reference of positive is \[3, .* give \[1, C",
        ),
        (ExtraTokens(context=(SOURCE.long(),)), "torch.int64"),
    ],
)
def test_tokens_that_make_no_request(
    make_request: Request, tokens: ExtraTokens, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make_request(tokens=tokens)
