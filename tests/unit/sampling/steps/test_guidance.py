"""Guidance of runs: scales by step, NAG, and context token guidance (Bernini).

Guided steps of the last have lanes with the negative text and without context.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from wanstream.distributed.driver.driver import stage_steps
from wanstream.plan.programs import SkipRule
from wanstream.sampling import LaneInputs, calibrate, request_run_shape, working_bytes
from wanstream.sampling.cache.settings import EasyCache, FirstBlockCache, MagCache
from wanstream.sampling.inputs import ExtraTokens
from wanstream.sampling.loop.lanes import names_at
from wanstream.sampling.loop.memory import extra_tokens_of
from wanstream.sampling.steps import RequestError, StepProgress
from wanstream.sampling.steps.sides import Side, guided_velocity, sides_at
from wanstream.shapes import HEAD_DIM, ContextWindows
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import (
    CPU,
    block_calls,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.wan import Nag

NAG = Nag(scale=5.0, tau=1.5, alpha=0.5)
VIDEO_TOKENS = 12
IMAGE_TOKENS = 10
SCALE = 1.75
ALL_SIDES = (Side.POSITIVE, Side.NO_CONTEXT, Side.NEGATIVE)
SOURCE = normal(1, 16, 2, 4, 6, seed=31)
IMAGE = normal(1, 16, 1, 4, 10, seed=32)
CONTEXT = ExtraTokens(context=(SOURCE, IMAGE))
CONTEXT_OF_TWO = ExtraTokens(context=(torch.cat([SOURCE, -SOURCE]), IMAGE))
NONE = ExtraTokens()


@pytest.fixture
def make_nag(make_request):
    """An unguided request with NAG, 3 steps, 1 of them high-noise."""
    given = {"steps": 3, "switch_step": 1, "guidance": (1.0, 1.0), "nag": NAG}
    return lambda **changes: make_request(**{**given, **changes})


@pytest.fixture
def make_guided(make_request):
    """A request with source, image and `context_guidance`."""
    given = {"tokens": CONTEXT, "context_guidance": SCALE}
    return lambda **changes: make_request(**{**given, **changes})


@pytest.mark.usefixtures("exact_blocks")
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
    assert stages(2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0) == [range(4), range(4, 6), range(6, 8)]


def test_a_list_of_ones_needs_no_negative(make_request):
    assert not make_request(guidance_steps=(1.0,), negative=None).guidance_settings.guided


def test_it_changes_a_run_as_the_negative_text_wants(short_pair, make_nag):
    def latents(**changes):
        return latents_of(short_pair, make_nag(**changes))

    on = latents()
    off = latents(nag=None)
    assert torch.equal(latents(nag=Nag(alpha=0.0)), off)
    assert not torch.allclose(off, on, rtol=1e-3)
    assert not torch.allclose(on, latents(negative=-make_nag().negative), rtol=1e-3)
    assert torch.equal(latents(windows=ContextWindows(frames=2, overlap=0)), on)


def test_one_lane_does_the_work_and_no_byte_more_is_moved(open_pair, make_nag):
    def cost(**changes):
        pair = open_pair()
        calls = block_calls(pair)
        timeline = run(pair, make_nag(**changes)).timeline
        return len(calls), [step.bytes_moved for step in timeline.steps], timeline.non_block_bytes

    off = cost(nag=None)
    on = cost()
    guided = cost(guidance=(4.0, 3.0), nag=None)
    assert on[:2] == off[:2]
    assert (on[0], guided[0]) == (3, 6)
    assert on[2] == guided[2] > 0, "both texts are embedded before the first step"


def test_guided_steps_are_left_alone(pair, make_nag):
    def steps(**changes):
        progress: list[StepProgress] = []
        run(pair, make_nag(**changes), on_step=progress.append)
        return [step.denoised for step in progress]

    off, on = (steps(guidance=(4.0, 1.0), nag=nag) for nag in (None, NAG))
    assert [*map(torch.equal, off, on)] == [True, False, False]
    assert all(map(torch.equal, steps(guidance_steps=(4.0, 1.0)), on))


def test_steps_have_the_sides_of_their_scales():
    assert sides_at(1.0, SCALE) == sides_at(1.0) == (Side.POSITIVE,)
    assert sides_at(4.0) == sides_at(4.0, 1.0) == (Side.POSITIVE, Side.NEGATIVE)
    assert sides_at(4.0, SCALE) == sides_at(0.0, 0.0) == ALL_SIDES


@pytest.mark.parametrize("context_scale", [0.0, 0.5, SCALE])
def test_the_velocity_is_that_of_two_scales(context_scale):
    positive, none, negative = (normal(2, 16, 2, 4, 6, seed=seed) for seed in (1, 2, 3))
    exact = none.double() + context_scale * (negative.double() - none.double())
    exact += 4.0 * (positive.double() - negative.double())
    lanes = [*positive.split(1), *none.split(1), *negative.split(1)]
    assert difference(guided_velocity(lanes, ALL_SIDES, 4.0, context_scale).double(), exact) <= 1e-6


@pytest.mark.parametrize(("batch", "tokens"), [(1, CONTEXT), (2, CONTEXT_OF_TWO)])
def test_a_step_combines_three_forward_passes(batch, tokens, short_pair, make_guided):
    """Latents after one Euler step are affine in the velocity. The three weights add up to 1."""
    one = {"solver": "euler", "end_step": 1, "leftover_noise": True}
    guided = make_guided(**one, batch=batch, tokens=tokens)
    off = changed_request(guided, guidance=(1.0, 1.0), context_guidance=1.0)
    held = changed_request(off, positive=guided.negative)
    requests = (off, held, changed_request(held, tokens=NONE))
    positive, negative, none = (latents_of(short_pair, each).double() for each in requests)
    expected = none + SCALE * (negative - none) + 4.0 * (positive - negative)
    assert difference(latents_of(short_pair, guided).double(), expected) <= ROUNDING


def test_lanes_without_context_have_the_negative_text(make_guided):
    request = make_guided(batch=2, guidance=(4.0, 1.0), nag=Nag())
    lanes = LaneInputs(request, CPU).lanes(request.noise, request.sides_at(0))
    expected = [(side, sample) for side in ALL_SIDES for sample in (0, 1)]
    assert [(lane.name.side, lane.name.sample) for lane in lanes] == expected
    assert [len(lane.behind) for lane in lanes] == [2, 2, 0, 0, 2, 2]
    for short, long in zip(lanes[2:4], lanes[4:], strict=True):
        assert torch.equal(short.text, long.text)
    assert request.sides_at(4) == (Side.POSITIVE,), "in steps of guidance 1"


def test_the_reference_of_fun_control_stays(make_guided):
    both = ExtraTokens(reference=normal(1, 16, 1, 4, 6, seed=33), context=(IMAGE,))
    request = make_guided(tokens=both)
    lanes = LaneInputs(request, CPU, reads_reference=True).lanes(request.noise, request.sides_at(0))
    assert [(len(lane.front), len(lane.behind)) for lane in lanes] == [(1, 1), (1, 0), (1, 1)]


@pytest.mark.slow  # several loop runs
def test_windows_have_lanes_without_context(short_pair, make_guided):
    long = normal(1, 16, 5, 4, 6, seed=1)
    windows = ContextWindows(frames=3, overlap=1, shift_windows=False)
    request = make_guided(noise=long, tokens=ExtraTokens(context=(long, IMAGE)), windows=windows)
    sides = [name.side for name in names_at(request, 0)]
    assert sides == [each for each in ALL_SIDES for _ in "12"]
    assert extra_tokens_of(short_pair, request) == (18 + IMAGE_TOKENS, 0, 18 + IMAGE_TOKENS)
    lane_tokens = request_run_shape(short_pair, request, CPU).lane_tokens("high")
    assert lane_tokens == (46,) * 2 + (18,) * 2 + (46,) * 2
    plain = latents_of(short_pair, changed_request(request, context_guidance=1.0))
    assert difference(latents_of(short_pair, request), plain) > 0.01


def test_the_planner_counts_three_lanes_and_their_own_tokens(short_pair, make_guided):
    long = VIDEO_TOKENS + VIDEO_TOKENS + IMAGE_TOKENS
    shape = request_run_shape(short_pair, make_guided(batch=2, guidance=(4.0, 1.0)), CPU)
    assert (shape.lanes, shape.sides) == ({"high": 6, "low": 2}, {"high": 3, "low": 1})
    assert shape.tokens == long
    assert shape.lane_tokens("high") == (long, long, VIDEO_TOKENS, VIDEO_TOKENS, long, long)
    assert shape.lane_tokens("low") == (long, long)
    mixed = request_run_shape(short_pair, make_guided(guidance_steps=(4.0, 1.0)), CPU)
    of_steps = [mixed.lane_tokens_of_step(step) for step in (0, 1, 4)]
    assert of_steps == [(long, VIDEO_TOKENS, long), (long,), (long,)]
    assert mixed.lane_tokens("high") == (long, VIDEO_TOKENS, long)


def test_the_memory_counts_three_lanes_and_their_own_tokens(short_pair, make_guided):
    request = make_guided()
    extra = VIDEO_TOKENS + IMAGE_TOKENS
    assert extra_tokens_of(short_pair, request) == (extra, 0, extra)
    width = 256
    two, three, equal = (
        working_bytes(short_pair, request.computed_shape, sides=sides)
        for sides in [(extra,) * 2, (extra, 0, extra), (extra,) * 3]
    )
    texts = 2 * 512 * width * 4
    rotary = VIDEO_TOKENS * HEAD_DIM * 4
    assert three - two == VIDEO_TOKENS * width * 4 + texts + rotary
    assert equal - three == extra * width * 4 - rotary


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("cache", [FirstBlockCache(threshold=1e9), EasyCache(threshold=1e9)])
def test_a_cache_skips_all_sides(cache, short_pair, make_guided):
    request = make_guided(steps=8, switch_step=4, cache=cache)
    steps = run(short_pair, request).timeline.steps
    assert {step.skipped_lanes for step in steps if step.skipped_visits} == {3}
    never = changed_request(request, cache=replace(cache, threshold=0.0))
    plain = changed_request(request, cache=None)
    assert torch.equal(latents_of(short_pair, never), latents_of(short_pair, plain))


@pytest.mark.slow  # several loop runs
def test_magcache_needs_a_table_of_all_sides(short_pair, make_guided):
    request = make_guided(steps=8, switch_step=4)
    rule = SkipRule(threshold=1e9, max_consecutive_skips=1, retention=0.25)
    plain = changed_request(request, context_guidance=1.0)
    two, three = (
        MagCache(
            table=calibrate(each, lambda each: run(short_pair, each), source="test"), rule=rule
        )
        for each in (plain, request)
    )
    assert (len(two.table.ratios), len(three.table.ratios)) == (2, 3)
    message = "calibrated without context_guidance around step 1, and this run has it"
    with pytest.raises(RequestError, match=message):
        changed_request(request, cache=two)
    steps = run(short_pair, changed_request(request, cache=three)).timeline.steps
    assert {step.skipped_lanes for step in steps if step.skipped_visits} == {3}
    changed_request(plain, cache=three)  # has more than is needed


NO_EFFECT = {
    "make_request": [
        ({"guidance_steps": ()}, r"\(\): give a number for each step, the last one for the rest"),
        ({"guidance_steps": (1.0, float("nan"))}, "guidance_steps .*nan.*: give a number for each"),
        ({"guidance_steps": (1.0,) * 7}, "has 7 numbers for 5 steps: remove the last 2"),
        ({"guidance_steps": (1.0, 2.0), "negative": None}, "give one, or give guidance_steps"),
    ],
    "make_nag": [
        ({"negative": None}, "NAG needs a negative text"),
        ({"guidance": (4.0, 3.0)}, "NAG acts in steps of guidance 1, and this run has none"),
        ({"guidance": (4.0, 1.0), "end_step": 1}, "this run has none"),
    ],
    "make_guided": [
        ({"tokens": NONE}, r"is 1.75, and the negative has no context \(context_latents\) that co"),
        ({"negative_tokens": NONE}, "through WanStream Bernini, with a source or a reference, or "),
        ({"guidance": (1.0, 1.0)}, "acts in steps whose guidance is not 1, of which this run has"),
        ({"guidance": (1.0, 3.0), "end_step": 2}, "has none: .* a Wan Guidance of its own"),
        ({"context_guidance": math.nan}, "context_guidance is nan: give a finite number"),
        ({"negative": None}, "needs a negative text"),
    ],
}
"""Changes and refusals by the fixture that makes the request."""


@pytest.mark.parametrize(
    ("make", "changes", "message"), [(make, *row) for make in NO_EFFECT for row in NO_EFFECT[make]]
)
def test_guidance_without_an_effect_is_refused(make, changes, message, request):
    with pytest.raises(RequestError, match=message):
        request.getfixturevalue(make)(**changes)
