"""Step caches alone and in windows: equal to diffusers' or the definition, and bytes saved."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import EasyCache, FirstBlockCache, MagCache, calibrate
from wanstream.sampling.cache import MagTable
from wanstream.sampling.cache.base import LaneName, PassStart, Stage
from wanstream.sampling.cache.easycache import _distance, computed_steps
from wanstream.sampling.cache.first_block import FirstBlockSteps, _abs_distance
from wanstream.sampling.steps import LOCAL_FORWARD, RequestError, RunSlice
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.rounding import ROUNDING
from wanstream.tests.support.sampling.plain_loop import windowed_loop
from wanstream.tests.support.sampling.runs import LAYERWISE, latents_of, normal, run, skipped
from wanstream.tests.support.sampling.short_memory import ShortPair, once

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
STEPS = 8
SWITCH = 4
FRAMES = 7
MOVING = ContextWindows(frames=3, overlap=1)
STILL = replace(MOVING, shift_windows=False)
STRIDED = replace(MOVING, overlap=0, stride=2)
DEEP = OffloadPolicy.layerwise(3)
PINNED = OffloadPolicy.block_swap(2, 1, source="pinned")
POLICIES = [OffloadPolicy.resident(), OffloadPolicy.layerwise(0), PINNED]
FIRST = FirstBlockCache
EASY = EasyCache
SOME = {FIRST: FIRST(threshold=0.55), EASY: EASY(threshold=0.8)}
"""Skips in some steps, and with the first block in some steps for one lane only.

Thresholds are large because these experts' outputs change a lot when the input changes little.
"""

both = pytest.mark.parametrize("kind", [FIRST, EASY])


@pytest.fixture
def make_windowed(make_eight_steps):
    """`make_windowed(**changes)`: a request with 7 latent frames and 8 steps in fixed windows."""
    given = {"noise": normal(1, 16, FRAMES, 4, 6, seed=20), "windows": STILL}
    return lambda **changes: make_eight_steps(**{**given, **changes})


def with_first_block_cache(models, request, threshold):
    config = FirstBlockCacheConfig(threshold=threshold)
    return windowed_loop(models, request, {"high": config, "low": config})


@torch.inference_mode()
def defined(models, request, threshold):
    """Return the latents and skipped steps of EasyCache's definition, for whole models."""
    plan = request.step_plan
    latents = before = request.noise
    left_out = []
    solver = Solver(request.solver, plan.schedule, request.start_step)
    expert = ""
    for step in plan.steps:
        if plan.experts[step] != expert:
            expert = plan.experts[step]
            factor = math.nan
            total = 0.0
            history = []
        if history:
            moved = (latents.double() - before.double()).abs().sum()
            total += factor * float(moved / history[-1][1].double().abs().mean())
        before = latents
        if len(history) >= 2 and step != STEPS - 1 and total / latents.numel() < threshold:
            left_out.append(step)
            found = [latents + (output - history[-1][0]) for output in history[-1][1]]
        else:
            time = torch.tensor([plan.schedule.timesteps[step]])
            total = 0.0
            texts = request.positive, request.negative
            found = [models[expert](latents, time, text, return_dict=False)[0] for text in texts]
            if history:
                old_input, old = history[-1]
                changed = (torch.stack(found).double() - old.double()).abs().mean()
                factor = float(changed / (latents.double() - old_input.double()).abs().mean())
            history.append((latents, torch.stack(found)))
        positive, negative = found
        latents = solver.step(negative + plan.guidance[step] * (positive - negative), latents)
    return latents, left_out


def test_easycache_is_its_definition(open_pair, plain_models, make_eight_steps):
    for threshold, left_out in ((0.67, [6]), (0.8, [2, 6])):
        request = make_eight_steps(cache=EASY(threshold=threshold))
        latents, expected = defined(plain_models(), request, threshold)
        result = run(open_pair(), request)
        assert skipped(result) == expected == left_out
        assert torch.equal(result.latents, latents)


def test_the_first_block_cache_is_diffusers(open_pair, plain_models, make_eight_steps):
    for threshold, lanes in ((0.55, {0, 1, 2}), (1e9, {0, 2})):
        request = make_eight_steps(cache=FIRST(threshold=threshold))
        result = run(open_pair(), request)
        expected = with_first_block_cache(plain_models(), request, threshold)
        assert torch.equal(result.latents, expected)
        steps = result.timeline.steps
        assert {step.skipped_lanes for step in steps} == lanes
        for step in steps:
            assert (step.skipped_visits == LAYERS - 1) == (step.skipped_lanes == 2)


@pytest.mark.parametrize(
    ("cache", "policy"),
    [
        (FIRST(threshold=0.0), LAYERWISE),
        (EASY(threshold=0), OffloadPolicy.resident()),
        (EASY(retention=1.0), LAYERWISE),
    ],
    ids=str,
)
def test_a_cache_that_skips_nothing_changes_no_bit(cache, policy, short_pair, make_eight_steps):
    cached = run(short_pair, make_eight_steps(cache=cache), policy)
    assert torch.equal(cached.latents, latents_of(short_pair, make_eight_steps(), policy))
    assert skipped(cached) == []


@both
def test_no_policy_changes_a_bit(kind, pair, make_eight_steps):
    request = make_eight_steps(cache=SOME[kind])
    expected = run(pair, request)
    for policy in (*POLICIES, POLICIES[-1]):  # the last run starts from kept blocks
        found = run(pair, request, policy)
        assert torch.equal(found.latents, expected.latents)
        assert skipped(found) == skipped(expected) != []


def test_easycache_skips_every_block(pair, make_eight_steps):
    request = make_eight_steps(cache=EASY(threshold=1e9))
    steps = run(pair, request, OffloadPolicy.layerwise(2)).timeline.steps
    blocks = [step.bytes_moved / pair.block_bytes.stored for step in steps]
    assert sum(blocks) <= 5 * LAYERS + 2 * 3
    assert blocks[2] <= 3
    assert [step.skipped_lanes for step in steps] == [0, 0, 2, 2, 0, 0, 2, 0]
    assert [step.skipped_visits for step in steps] == [0, 0, LAYERS, LAYERS, 0, 0, LAYERS, 0]


@pytest.mark.parametrize("ahead", [0, 2])
def test_every_fetched_block_is_used(ahead, pair, engine_runs, make_eight_steps):
    """Exception: blocks prefetched at an expert's end.

    A fetch issued for a skipped step serves the next one.
    """
    request = make_eight_steps(cache=SOME[FIRST])
    timeline = run(pair, request, OffloadPolicy.layerwise(ahead)).timeline
    computed = [step for step in timeline.steps if not step.skipped_visits]
    assert 2 < len(computed) < STEPS
    fetched = sum(len(each.fetched) for each in engine_runs)
    needed = len(computed) * (LAYERS - 1) + 2  # each expert's first block is resident
    # A run ended before the next fetch is issued leaves the step's last block. The next run
    # keeps it.
    kept = sum(len(each.program.initial) for each in engine_runs)
    assert needed - kept <= fetched <= needed + 2 * (ahead + 1)
    assert timeline.bytes_moved == fetched * pair.block_bytes.stored
    assert len(engine_runs) == 1 + timeline.skipped_steps - (timeline.steps[-1].skipped_visits > 0)


def test_the_first_block_is_looked_at_before_the_next_poll(open_pair, make_eight_steps):
    """A run can be stopped in a step that needs one block, as in any other."""
    polls = list[int]()
    request = make_eight_steps(cache=FIRST(threshold=1e9))
    run(open_pair(), request, should_stop=lambda: bool(polls.append(1)))
    assert len(polls) == 2 * LAYERS + (STEPS - 2)


@both
@pytest.mark.slow  # several loop runs
def test_a_step_with_a_shortage_decides_as_without_one(kind, open_pair, make_eight_steps):
    """The shortage comes at a block, or behind the blocks: a step is not its own past."""
    request = make_eight_steps(cache=SOME[kind])
    whole = run(open_pair(), request, DEEP)
    uses = [(use, False) for use in range(1, 2 * LAYERS * len(skipped(whole)), 5)]
    for use, behind in [*uses, (1, True), (3, True), (5, True), (2 * SWITCH + 1, True)]:
        disturbed = run(ShortPair(open_pair(), once(use), behind=behind), request, DEEP)
        assert torch.equal(disturbed.latents, whole.latents), use
        assert len(disturbed.timeline.changes) == 1, "the shortage came"
        assert skipped(disturbed) == skipped(whole)


@pytest.mark.parametrize(("kind", "computed"), [(FIRST, [1, 4]), (EASY, [1, 2, 4, 5, 7])])
def test_a_resumed_run_measures_again(kind, computed, short_pair, make_eight_steps):
    request = make_eight_steps(cache=kind(threshold=1e9))
    states = list[Any]()
    run(short_pair, request, on_step=lambda step: states.append(step.state()))
    rest = run(short_pair, request, part=RunSlice(resume=states[0]))
    assert sorted({*range(1, STEPS)} - {*skipped(rest)}) == computed


@pytest.mark.parametrize(("kind", "computed"), [(FIRST, [0, 3]), (EASY, [0, 1, 3, 4, 7])])
def test_another_number_of_lanes_begins_anew(kind, computed, open_pair, make_eight_steps):
    changes = {"guidance_steps": (3.0,) * 3 + (1.0,) * (STEPS - 3), "switch_step": 0}
    result = run(open_pair(layers=2), make_eight_steps(cache=kind(threshold=1e9), **changes))
    assert sorted({*range(STEPS)} - {*skipped(result)}) == computed


def test_easycache_computes_first_and_last_steps():
    names = (LaneName(0, 0),)
    steps = {step: (Stage("high" if step < 20 else "low"), names) for step in range(40)}
    assert computed_steps(steps, 0.2) == {0, 1, 2, 3, 20, 21, 22, 23, 39}
    assert computed_steps(steps, 0.0) == {0, 1, 20, 21, 39}
    assert computed_steps({}, 0.2) == frozenset()


def test_known_skips_start_again_where_a_strength_changes():
    names = (LaneName(0, 0),)
    steps = {step: (Stage("high"), names) for step in range(8)}
    changing = {step: (Stage("high", int(step >= 4)), names) for step in range(8)}
    sigmas = tuple(1 - step / 8 for step in range(9))
    table = MagTable(sigmas=sigmas, experts=("high",) * 8, ratios=((1.0,) * 8,), marks={})
    rule = SkipRule(threshold=0.5, max_consecutive_skips=7, retention=0.0)
    cache = MagCache(table=table, rule=rule)
    assert cache.start(steps).skipped == frozenset(range(1, 8))
    exact = MagCache(table=table, rule=replace(rule, threshold=0.0))
    assert exact.start(steps).skipped == frozenset()
    assert cache.start(changing).skipped == {1, 2, 3, 5, 6, 7}
    assert computed_steps(changing, 0.0) == {0, 1, 3, 4, 5, 7}


@pytest.mark.parametrize(("change", "going"), [(0.25, ()), (0.75, (0,))])
def test_a_change_is_measured_in_the_video_alone(change, going):
    """The video's residuals change by less and by more than the threshold.

    The residuals next to the video are huge.
    """
    cache = FirstBlockSteps(0.5, LOCAL_FORWARD)
    names = [LaneName(0, 0)]
    video = slice(2, 6)

    def decided(step: int, of_video: float, of_others: float) -> tuple[int, ...]:
        hidden = torch.full((1, 9, 4), of_others)
        hidden[:, video] = of_video
        steps = cache.begin(PassStart(step, Stage("high"), names, names, torch.nn.Identity()))
        steps.entered(0, torch.zeros_like(hidden), hidden, video)
        decision = steps.choose()
        for lane in decision.lanes:
            steps.ended(lane, hidden)
        return tuple(decision.lanes)

    assert decided(0, 1.0, 1e6) == (0,), "nothing to compare with"
    # In all tokens, the first change would be far above the threshold, the second far below.
    assert decided(1, 1.0 + change, 1e6 if going else -1e6) == going


@pytest.mark.parametrize("distance", [_distance, _abs_distance])
def test_a_device_needs_no_float64(distance):
    now = normal(1, 9000, 256, seed=0).bfloat16()
    found = distance(now, torch.zeros_like(now))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(now.double().abs().sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "name", "largest"),
    [(FIRST, "threshold", math.inf), (EASY, "threshold", math.inf), (EASY, "retention", 1.1)],
)
def test_bad_settings_are_refused(kind, name, largest):
    for value in (-0.1, largest, math.nan):
        with pytest.raises(RequestError, match=name):
            kind(**{name: value})


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("windows", "threshold"), [(STILL, 0.55), (MOVING, 0.55), (STRIDED, 1e9), (MOVING, 0)]
)
def test_windows_have_diffusers_cache(windows, threshold, open_pair, plain_models, make_windowed):
    request = make_windowed(windows=windows, cache=FIRST(threshold=threshold))
    found = run(open_pair(), request)
    expected = with_first_block_cache(plain_models(), request, threshold)
    torch.testing.assert_close(found.latents, expected, rtol=ROUNDING, atol=ROUNDING)
    assert any(step.skipped_lanes for step in found.timeline.steps) == (threshold > 0)


def test_fixed_windows_skip_the_steps_of_a_whole_video(pair, make_windowed):
    for windows in (STILL, None):
        result = run(pair, make_windowed(windows=windows, cache=FIRST(threshold=1e9)))
        assert skipped(result) == [1, 2, 3, 5, 6, 7]
        # Blocks in transfer when the rest is skipped serve the next step: one prefetched block and
        # the first one.
        moved = [step.bytes_moved for step in result.timeline.steps[1 : SWITCH - 1]]
        assert sum(moved) <= 2 * pair.block_bytes.stored


def test_magnitudes_skip_a_step_only_with_the_windows_before(short_pair, make_windowed):
    table = calibrate(make_windowed(), partial(run, short_pair), source="a test")
    windows = ContextWindows(frames=3, overlap=0)
    rule = SkipRule(threshold=1e9, max_consecutive_skips=9, retention=0.0)
    request = make_windowed(windows=windows, cache=MagCache(table=table, rule=rule))
    placed = [windows.at(step, FRAMES) for step in range(STEPS)]
    assert [step for step in range(1, STEPS) if placed[step] == placed[step - 1]] == [6]
    assert skipped(run(short_pair, request)) == [6]
    message = r"windows shift in every.* turn shift_windows off in Wan Context Windows"
    with pytest.raises(RequestError, match=message):
        make_windowed(windows=MOVING, cache=request.options.cache)


@pytest.mark.slow  # several loop runs
def test_a_run_in_windows_can_be_calibrated(open_pair, make_windowed):
    def ratios(windows: ContextWindows | None) -> tuple[tuple[float, ...], ...]:
        request = make_windowed(windows=windows)
        return calibrate(request, partial(run, open_pair()), source="a test").ratios

    assert ratios(ContextWindows(frames=FRAMES, overlap=0)) == ratios(None)
    moving = ratios(MOVING)
    still = ratios(STILL)
    assert moving != still
    assert len(moving) == len(still) == 2
    for side in (*moving, *still):
        assert [step for step, ratio in enumerate(side) if ratio == 1.0] == [0, SWITCH]
