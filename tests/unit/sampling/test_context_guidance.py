"""Context token guidance (Bernini).

Guided steps have lanes with the negative text and without context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.plan.programs import SkipRule
from wanstream.sampling import LaneInputs, denoise, request_run_shape, working_bytes
from wanstream.sampling.cache.settings import EasyCache, FirstBlockCache, MagCache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens, merge_requests, split_request
from wanstream.sampling.loop.lanes import names_at
from wanstream.sampling.loop.memory import extra_tokens_of
from wanstream.sampling.steps import DenoiseResult, RequestError
from wanstream.sampling.steps.sides import Side, guided_velocity, sides_at
from wanstream.schema import OffloadPolicy
from wanstream.shapes import HEAD_DIM, ContextWindows
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag

LAYERWISE = OffloadPolicy.layerwise(1)
CPU = torch.device("cpu")
VIDEO_TOKENS, IMAGE_TOKENS = 12, 10
SCALE = 1.75
ALL_SIDES = (Side.POSITIVE, Side.NO_CONTEXT, Side.NEGATIVE)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SOURCE, IMAGE = _normal(1, 16, 2, 4, 6, seed=31), _normal(1, 16, 1, 4, 10, seed=32)
CONTEXT = ExtraTokens(context=(SOURCE, IMAGE))


@pytest.fixture
def make_guided(make_request: Request) -> Request:
    """`make_guided(**changes)`: a request with source, image and `context_guidance` SCALE."""

    def make(**changes: Any) -> DenoiseRequest:
        return make_request(**{"tokens": CONTEXT, "context_guidance": SCALE, **changes})

    return make


def run(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE
) -> DenoiseResult:
    return denoise(pair, request, policy=policy, device="cpu")


def test_steps_have_the_sides_of_their_scales() -> None:
    assert sides_at(1.0, SCALE) == sides_at(1.0) == (Side.POSITIVE,)
    assert sides_at(4.0) == sides_at(4.0, 1.0) == (Side.POSITIVE, Side.NEGATIVE)
    assert sides_at(4.0, SCALE) == sides_at(0.0, 0.0) == ALL_SIDES


@pytest.mark.parametrize("context_scale", [0.0, 0.5, SCALE])
def test_the_velocity_is_that_of_two_scales(context_scale: float) -> None:
    positive, none, negative = (_normal(2, 16, 2, 4, 6, seed=seed) for seed in (1, 2, 3))
    exact = none.double() + context_scale * (negative.double() - none.double())
    exact += 4.0 * (positive.double() - negative.double())
    lanes = [*positive.split(1), *none.split(1), *negative.split(1)]
    assert difference(guided_velocity(lanes, ALL_SIDES, 4.0, context_scale).double(), exact) <= 1e-6


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_combines_three_forward_passes(
    batch: int, open_pair: OpenPair, make_guided: Request
) -> None:
    """Latents after one Euler step are affine in the velocity. The three weights add up to 1."""
    pair = open_pair()
    both = ExtraTokens(context=(torch.cat([SOURCE, -SOURCE])[:batch], IMAGE))
    one = {"batch": batch, "tokens": both, "solver": "euler", "end_step": 1, "leftover_noise": True}
    guided = make_guided(**one)
    off = changed_request(guided, guidance=(1.0, 1.0), context_guidance=1.0)
    positive = run(pair, off).latents.double()
    negative = run(pair, changed_request(off, positive=guided.negative)).latents.double()
    none = run(
        pair, changed_request(off, positive=guided.negative, tokens=ExtraTokens())
    ).latents.double()
    expected = none + SCALE * (negative - none) + 4.0 * (positive - negative)
    assert difference(run(pair, guided).latents.double(), expected) <= ROUNDING


@pytest.mark.slow  # several loop runs
def test_a_scale_of_one_is_plain_guidance(open_pair: OpenPair, make_guided: Request) -> None:
    pair, plain = open_pair(), make_guided(context_guidance=1.0)
    assert [name.side for name in names_at(plain, 0)] == [Side.POSITIVE, Side.NEGATIVE]
    found = run(pair, plain).latents
    velocities = [_normal(1, 16, 2, 4, 6, seed=seed) for seed in (1, 2)]
    usual = velocities[1] + 4.0 * (velocities[0] - velocities[1])
    assert torch.equal(guided_velocity(velocities, sides_at(4.0, 1.0), 4.0), usual)
    near = run(pair, changed_request(plain, context_guidance=1 + 1e-6)).latents
    assert difference(near, found) <= 1e-5
    assert difference(run(pair, make_guided()).latents, found) > 0.01


def test_lanes_without_context_have_the_negative_text(make_guided: Request) -> None:
    request = make_guided(batch=2, guidance=(4.0, 1.0), nag=Nag())
    inputs = LaneInputs(request, CPU)
    lanes = inputs.lanes(request.noise, request.sides_at(0))
    assert [(lane.name.side, lane.name.sample) for lane in lanes] == [
        (side, sample) for side in ALL_SIDES for sample in (0, 1)
    ]
    assert [len(lane.behind) for lane in lanes] == [2, 2, 0, 0, 2, 2]
    for short, long in zip(lanes[2:4], lanes[4:], strict=True):
        assert torch.equal(short.text, long.text)
    assert request.sides_at(4) == (Side.POSITIVE,), (
        "steps of guidance 1 have no lanes without context"
    )


def test_the_reference_of_fun_control_stays(make_request: Request) -> None:
    both = ExtraTokens(reference=_normal(1, 16, 1, 4, 6, seed=33), context=(IMAGE,))
    request = make_request(tokens=both, context_guidance=SCALE)
    lanes = LaneInputs(request, CPU, reads_reference=True).lanes(request.noise, request.sides_at(0))
    assert [(len(lane.front), len(lane.behind)) for lane in lanes] == [(1, 1), (1, 0), (1, 1)]


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    "policy",
    [LAYERWISE, OffloadPolicy.block_swap(2), OffloadPolicy.layerwise(1, source="pinned")],
    ids=str,
)
def test_streamed_equals_resident(
    policy: OffloadPolicy, open_pair: OpenPair, make_guided: Request
) -> None:
    pair, request = open_pair(), make_guided()
    resident = run(pair, request, OffloadPolicy.resident()).latents
    assert torch.equal(run(pair, request, policy).latents, resident)


def test_weights_move_once_for_all_sides(open_pair: OpenPair, make_guided: Request) -> None:
    pair = open_pair()
    moved = [
        [step.bytes_moved for step in run(pair, make_guided(context_guidance=scale)).timeline.steps]
        for scale in (1.0, SCALE)
    ]
    assert moved[0] == moved[1]


@pytest.mark.slow  # several loop runs
def test_samples_of_a_batch_equal_single_runs(open_pair: OpenPair, make_guided: Request) -> None:
    pair = open_pair()
    request = make_guided(
        batch=2, tokens=ExtraTokens(context=(torch.cat([SOURCE, -SOURCE]), IMAGE))
    )
    expected = run(pair, request).latents
    parts = split_request(request, [1, 1])
    for sample, part in enumerate(parts):
        assert torch.equal(run(pair, part).latents, expected[sample : sample + 1])
    assert torch.equal(run(pair, merge_requests(parts)).latents, expected)


def test_requests_of_other_scales_are_not_merged(make_guided: Request) -> None:
    with pytest.raises(RequestError, match=r"context guidance 2\.0, in lane 1 1\.75"):
        merge_requests([make_guided(), make_guided(context_guidance=2.0)])


@pytest.mark.slow  # several loop runs
def test_windows_have_lanes_without_context(open_pair: OpenPair, make_guided: Request) -> None:
    pair, long = open_pair(), _normal(1, 16, 5, 4, 6, seed=1)
    windows = ContextWindows(frames=3, overlap=1, shift_windows=False)
    changes = {"noise": long, "tokens": ExtraTokens(context=(long, IMAGE)), "windows": windows}
    request = make_guided(**changes)
    assert [name.side for name in names_at(request, 0)] == [
        side for side in ALL_SIDES for _ in range(2)
    ]
    assert extra_tokens_of(pair, request) == (18 + IMAGE_TOKENS, 0, 18 + IMAGE_TOKENS)
    shape = request_run_shape(pair, request, CPU)
    assert shape.lane_tokens("high") == (46,) * 2 + (18,) * 2 + (46,) * 2
    assert (
        difference(
            run(pair, request).latents,
            run(pair, changed_request(request, context_guidance=1.0)).latents,
        )
        > 0.01
    )


def test_the_planner_counts_three_lanes_and_their_own_tokens(
    open_pair: OpenPair, make_guided: Request
) -> None:
    pair, request = open_pair(), make_guided(batch=2, guidance=(4.0, 1.0))
    long = VIDEO_TOKENS + VIDEO_TOKENS + IMAGE_TOKENS
    run = request_run_shape(pair, request, CPU)
    assert (run.lanes, run.sides, run.tokens) == (
        {"high": 6, "low": 2},
        {"high": 3, "low": 1},
        long,
    )
    assert run.lane_tokens("high") == (long, long, VIDEO_TOKENS, VIDEO_TOKENS, long, long)
    assert run.lane_tokens("low") == (long, long)
    mixed = request_run_shape(pair, make_guided(guidance_steps=(4.0, 1.0)), CPU)
    assert [mixed.lane_tokens_of_step(step) for step in (0, 1, 4)] == [
        (long, VIDEO_TOKENS, long),
        (long,),
        (long,),
    ]
    assert mixed.lane_tokens("high") == (long, VIDEO_TOKENS, long)


def test_the_memory_counts_three_lanes_and_their_own_tokens(
    open_pair: OpenPair, make_guided: Request
) -> None:
    pair, request = open_pair(), make_guided()
    extra = VIDEO_TOKENS + IMAGE_TOKENS
    assert extra_tokens_of(pair, request) == (extra, 0, extra)
    shape, width, value = request.computed_shape, 256, 4
    two, three, equal = (
        working_bytes(pair, shape, sides=sides)
        for sides in [(extra,) * 2, (extra, 0, extra), (extra,) * 3]
    )
    texts, rotary = 2 * 512 * width * value, VIDEO_TOKENS * HEAD_DIM * 4
    assert three - two == VIDEO_TOKENS * width * value + texts + rotary
    assert equal - three == extra * width * value - rotary


CACHES = {"first block": FirstBlockCache(threshold=1e9), "easycache": EasyCache(threshold=1e9)}


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_cache_skips_all_sides(cache: Any, open_pair: OpenPair, make_guided: Request) -> None:
    pair, request = open_pair(), make_guided(steps=8, switch_step=4, cache=cache)
    result = run(pair, request)
    assert {step.skipped_lanes for step in result.timeline.steps if step.skipped_visits} == {3}
    never = run(pair, changed_request(request, cache=replace(cache, threshold=0.0)))
    assert torch.equal(never.latents, run(pair, changed_request(request, cache=None)).latents)


@pytest.mark.slow  # several loop runs
def test_magcache_needs_a_table_of_all_sides(open_pair: OpenPair, make_guided: Request) -> None:
    pair, request = open_pair(), make_guided(steps=8, switch_step=4)
    rule = SkipRule(threshold=1e9, max_consecutive_skips=1, retention=0.25)
    tables = [
        calibrate(
            changed_request(request, context_guidance=scale),
            lambda each: run(pair, each),
            source="test",
        )
        for scale in (1.0, SCALE)
    ]
    assert [len(table.ratios) for table in tables] == [2, 3]
    with pytest.raises(
        RequestError, match="calibrated without context_guidance around step 1, and this run has it"
    ):
        changed_request(request, cache=MagCache(table=tables[0], rule=rule))
    result = run(pair, changed_request(request, cache=MagCache(table=tables[1], rule=rule)))
    assert {step.skipped_lanes for step in result.timeline.steps if step.skipped_visits} == {3}
    changed_request(request, context_guidance=1.0, cache=MagCache(table=tables[1], rule=rule))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": ExtraTokens()},
            r"is 1.75, and the negative has no context \(context_latents\) that could be",
        ),
        (
            {"negative_tokens": ExtraTokens()},
            r"the negative has no context .* through WanStream Bernini, with a source or a "
            r"reference, or set it to 1",
        ),
        (
            {"guidance": (1.0, 1.0)},
            "acts in steps whose guidance is not 1, of which this run has none: set it to 1",
        ),
        (
            {"guidance": (1.0, 3.0), "end_step": 2},
            "of which this run has none: .* a Wan Guidance of its own",
        ),
        ({"guidance": (1.0, 1.0), "tokens": ExtraTokens()}, "of which this run has none"),
        ({"context_guidance": math.nan}, "context_guidance is nan: give a finite number"),
        ({"context_guidance": math.inf}, "context_guidance is inf: give a finite number"),
        ({"negative": None}, "needs a negative text"),
    ],
)
def test_a_scale_without_an_effect_is_refused(
    changes: dict[str, Any], message: str, make_guided: Request
) -> None:
    with pytest.raises(RequestError, match=message):
        make_guided(**changes)
