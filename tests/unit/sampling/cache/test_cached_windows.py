"""Step caches with context windows: each window has separate residuals for each text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, WanTransformer3DModel

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import denoise
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.settings import FirstBlockCache, MagCache, policy_with_cache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest, split_request
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.rounding import ROUNDING
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS, STEPS, SWITCH, FRAMES = 4, 8, 4, 7
LAYERWISE = OffloadPolicy.layerwise(1)
MOVING = ContextWindows(frames=3, overlap=1)
STILL = replace(MOVING, shift_windows=False)
ALWAYS = FirstBlockCache(threshold=1e9)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]
Models = Mapping[str, WanTransformer3DModel]


@pytest.fixture
def make_windowed(make_request: Request) -> Request:
    """`make_windowed(**changes)`: a request with 7 latent frames and 8 steps in fixed windows.

    The first 4 steps are high-noise.
    """

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        noise = torch.randn(batch, 16, FRAMES, 4, 6, generator=torch.Generator().manual_seed(20))
        given = {
            "noise": noise,
            "steps": STEPS,
            "switch_step": SWITCH,
            "windows": STILL,
            "batch": batch,
        }
        return make_request(**{**given, **changes})

    return make


def run(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE, **options: Any
) -> Any:
    return denoise(pair, request, policy=policy, device="cpu", **options)


def skipped(result: Any) -> list[int]:
    return [step.index for step in result.timeline.steps if step.skipped_visits]


@torch.inference_mode()
def with_diffusers_cache(models: Models, request: DenoiseRequest, threshold: float) -> torch.Tensor:
    """Reference loop on whole models in windows, with diffusers' cache around each model.

    A cache serves one text and one window, as long as every step has the window.
    """
    assert request.options.windows is not None
    for model in models.values():
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    step_plan, latents = request.step_plan, request.noise
    solver = Solver(request.solver, step_plan.schedule, request.start_step)
    since: dict[tuple[int, ...], int] = {}
    for step in step_plan.steps:
        model, time = (
            models[step_plan.experts[step]],
            torch.tensor([step_plan.schedule.timesteps[step]]),
        )
        windows = request.options.windows.at(step, FRAMES)
        since = {window: since.get(window, step) for window in windows}
        sides = []
        for text in (request.positive, request.negative):
            whole = torch.zeros_like(latents)
            for window, weights in zip(
                windows, request.options.windows.weights(windows, FRAMES), strict=True
            ):
                with model.cache_context(f"{len(sides)} {window} {since[window]}"):
                    velocity = model(latents[:, :, list(window)], time, text, return_dict=False)[0]
                whole[:, :, list(window)] += velocity * torch.tensor(weights).reshape(
                    1, 1, -1, 1, 1
                )
            sides.append(whole)
        positive, negative = sides
        latents = solver.step(negative + step_plan.guidance[step] * (positive - negative), latents)
    return latents


@pytest.mark.slow  # several loop runs
def test_a_threshold_of_0_changes_no_bit(open_pair: OpenPair, make_windowed: Request) -> None:
    pair, plain = open_pair(), make_windowed(windows=MOVING)
    cached = run(pair, changed_request(plain, cache=FirstBlockCache(threshold=0.0)))
    assert torch.equal(cached.latents, run(pair, plain).latents)
    assert not any(step.skipped_lanes for step in cached.timeline.steps)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("windows", "threshold"),
    [(STILL, 0.55), (MOVING, 0.55), (replace(MOVING, overlap=0, stride=2), 1e9)],
)
def test_each_window_takes_over_what_diffusers_takes_over_for_it(
    windows: ContextWindows,
    threshold: float,
    open_pair: OpenPair,
    plain_models: Any,
    make_windowed: Request,
) -> None:
    request = make_windowed(windows=windows, cache=FirstBlockCache(threshold=threshold))
    found = run(open_pair(), request)
    expected = with_diffusers_cache(plain_models(), request, threshold)
    torch.testing.assert_close(found.latents, expected, rtol=ROUNDING, atol=ROUNDING)
    assert any(step.skipped_lanes for step in found.timeline.steps)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("windows", [MOVING, replace(MOVING, overlap=0, stride=2)])
def test_a_window_that_was_not_there_in_the_step_before_is_computed(
    windows: ContextWindows, open_pair: OpenPair, make_windowed: Request
) -> None:
    steps = run(open_pair(), make_windowed(windows=windows, cache=ALWAYS)).timeline.steps
    for before, step in pairwise(steps):
        now = windows.at(step.index, FRAMES)
        same = (
            set(now) & set(windows.at(before.index, FRAMES))
            if step.expert == before.expert
            else set()
        )
        assert step.skipped_lanes == 2 * len(same)
        assert step.skipped_visits == (LAYERS - 1 if len(same) == len(now) else 0)
    assert steps[0].skipped_lanes == 0


def test_windows_that_stay_leave_out_what_a_whole_video_does(
    open_pair: OpenPair, make_windowed: Request
) -> None:
    pair = open_pair()
    still, whole = (
        run(pair, make_windowed(windows=windows, cache=ALWAYS)) for windows in (STILL, None)
    )
    assert skipped(still) == skipped(whole) == [1, 2, 3, 5, 6, 7]
    # Blocks in transfer when the rest is skipped serve the next step: one prefetched block and the
    # first one.
    for steps in (still.timeline.steps[1 : SWITCH - 1], whole.timeline.steps[1 : SWITCH - 1]):
        assert sum(step.bytes_moved for step in steps) <= 2 * pair.block_bytes.stored


@pytest.mark.slow  # several loop runs
def test_a_video_among_others_is_the_video_alone(
    open_pair: OpenPair, make_windowed: Request
) -> None:
    pair, request = (
        open_pair(),
        make_windowed(batch=2, windows=MOVING, cache=FirstBlockCache(threshold=0.55)),
    )
    for part, sample in zip(
        split_request(request, [1, 1]), run(pair, request).latents, strict=True
    ):
        assert torch.equal(run(pair, part).latents[0], sample)


@pytest.mark.slow  # several loop runs
def test_a_step_that_is_taken_again_decides_as_it_did(
    open_pair: OpenPair, make_windowed: Request
) -> None:
    """Raise one out-of-memory error after the blocks, once early and once later."""
    request = make_windowed(windows=MOVING, cache=FirstBlockCache(threshold=0.55))
    whole = run(open_pair(), request, OffloadPolicy.layerwise(2))
    for use in (1, 15):
        with open_pair() as pair:
            left = [use]

            def fail(*_: object, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise torch.OutOfMemoryError("out of memory")

            policy = policy_with_cache(OffloadPolicy.layerwise(2), request.options.cache)
            models = pair.engine(policy, torch.device("cpu")).models.bare
            models["high"].proj_out.register_forward_pre_hook(fail)
            disturbed = run(pair, request, policy)
        assert torch.equal(disturbed.latents, whole.latents)
        assert len(disturbed.timeline.changes) == 1


@pytest.fixture
def table(open_pair: OpenPair, make_windowed: Request) -> MagTable:
    return calibrate(make_windowed(), partial(run, open_pair()), source="a test")


@pytest.mark.slow  # several loop runs
def test_magnitudes_leave_steps_out_where_windows_stay(
    open_pair: OpenPair, make_windowed: Request, table: MagTable
) -> None:
    pair, cache = open_pair(), MagCache(table=table, rule=SkipRule(threshold=1e9, retention=0.0))
    found = run(pair, make_windowed(cache=cache))
    assert skipped(found) == [1, 2, 5, 6]
    lanes = 2 * len(STILL.at(0, FRAMES))
    assert [step.skipped_lanes for step in found.timeline.steps] == [0, lanes, lanes, 0] * 2
    none = run(pair, make_windowed(cache=replace(cache, rule=SkipRule(threshold=0.0))))
    assert torch.equal(none.latents, run(pair, make_windowed()).latents)


def test_magnitudes_leave_a_step_out_only_with_the_windows_of_the_one_before(
    open_pair: OpenPair, make_windowed: Request, table: MagTable
) -> None:
    windows = ContextWindows(frames=3, overlap=0)
    cache = MagCache(
        table=table, rule=SkipRule(threshold=1e9, max_consecutive_skips=9, retention=0.0)
    )
    request = make_windowed(windows=windows, cache=cache)
    same = [
        step for step in range(1, STEPS) if windows.at(step, FRAMES) == windows.at(step - 1, FRAMES)
    ]
    assert same == [6]
    assert skipped(run(open_pair(), request)) == same


def test_magnitudes_with_windows_that_never_stay_are_refused(
    make_windowed: Request, table: MagTable
) -> None:
    cache = MagCache(table=table, rule=SkipRule(threshold=0.5))
    with pytest.raises(
        RequestError,
        match=r"windows shift in every.* turn shift_windows off in Wan Context Windows",
    ):
        make_windowed(windows=MOVING, cache=cache)


@pytest.mark.slow  # several loop runs
def test_a_run_in_windows_can_be_calibrated(open_pair: OpenPair, make_windowed: Request) -> None:
    def ratios(windows: ContextWindows | None) -> tuple[tuple[float, ...], ...]:
        return calibrate(
            make_windowed(windows=windows), partial(run, open_pair()), source="a test"
        ).ratios

    one = ContextWindows(frames=FRAMES, overlap=0)
    assert ratios(one) == ratios(None)
    moving, still = ratios(MOVING), ratios(STILL)
    assert moving != still
    for sides in (moving, still):
        assert len(sides) == 2
        assert all(
            (ratio == 1.0) == (step in (0, SWITCH))
            for side in sides
            for step, ratio in enumerate(side)
        )
