"""Step caches with context windows: each window has separate residuals for each text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling.cache.settings import FirstBlockCache, MagCache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import RequestError
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.rounding import ROUNDING
from wanstream.tests.support.sampling.plain_loop import blend_windows, plain_loop
from wanstream.tests.support.sampling.runs import MakeRequest, Models, normal, run, skipped

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS, STEPS, SWITCH, FRAMES = 4, 8, 4, 7
MOVING = ContextWindows(frames=3, overlap=1)
STILL = replace(MOVING, shift_windows=False)
STRIDED = replace(MOVING, overlap=0, stride=2)
ALWAYS = FirstBlockCache(threshold=1e9)


@pytest.fixture
def make_windowed(make_eight_steps: MakeRequest) -> MakeRequest:
    """`make_windowed(**changes)`: a request with 7 latent frames and 8 steps in fixed windows."""

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        noise = normal(batch, 16, FRAMES, 4, 6, seed=20)
        given = {"noise": noise, "windows": STILL, "batch": batch}
        return make_eight_steps(**{**given, **changes})

    return make


def with_diffusers_cache(models: Models, request: DenoiseRequest, threshold: float) -> torch.Tensor:
    """Reference loop on whole models in windows, with diffusers' cache around each model.

    A cache serves one text and one window, as long as every step has the window.
    """
    settings = request.options.windows
    for model in models.values():
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    placed = [settings.at(step, FRAMES) for step in range(STEPS)]

    def velocity_of(
        model: Any, step: int, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        def in_window(window: tuple[int, ...]) -> torch.Tensor:
            gaps = [before for before in range(step) if window not in placed[before]]
            with model.cache_context(f"{text is request.negative} {window} {gaps}"):
                return model(latents[:, :, list(window)], time, text, return_dict=False)[0]

        return blend_windows(settings, step, latents, in_window)

    return plain_loop(models, request, velocity_of)


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("windows", "threshold"), [(STILL, 0.55), (MOVING, 0.55), (STRIDED, 1e9), (MOVING, 0.0)]
)
def test_each_window_has_the_cache_of_diffusers(
    windows, threshold, open_pair, plain_models, make_windowed
):
    request = make_windowed(windows=windows, cache=FirstBlockCache(threshold=threshold))
    found = run(open_pair(), request)
    expected = with_diffusers_cache(plain_models(), request, threshold)
    torch.testing.assert_close(found.latents, expected, rtol=ROUNDING, atol=ROUNDING)
    assert any(step.skipped_lanes for step in found.timeline.steps) == (threshold > 0)


def test_fixed_windows_skip_the_steps_of_a_whole_video(open_pair, make_windowed):
    pair = open_pair()
    for windows in (STILL, None):
        result = run(pair, make_windowed(windows=windows, cache=ALWAYS))
        assert skipped(result) == [1, 2, 3, 5, 6, 7]
        # Blocks in transfer when the rest is skipped serve the next step: one prefetched block and
        # the first one.
        moved = [step.bytes_moved for step in result.timeline.steps[1 : SWITCH - 1]]
        assert sum(moved) <= 2 * pair.block_bytes.stored


def test_magnitudes_skip_a_step_only_with_the_windows_before(open_pair, make_windowed):
    pair = open_pair(layers=2)
    table = calibrate(make_windowed(), partial(run, pair), source="a test")
    windows = ContextWindows(frames=3, overlap=0)
    rule = SkipRule(threshold=1e9, max_consecutive_skips=9, retention=0.0)
    request = make_windowed(windows=windows, cache=MagCache(table=table, rule=rule))
    placed = [windows.at(step, FRAMES) for step in range(STEPS)]
    assert [step for step in range(1, STEPS) if placed[step] == placed[step - 1]] == [6]
    assert skipped(run(pair, request)) == [6]
    message = r"windows shift in every.* turn shift_windows off in Wan Context Windows"
    with pytest.raises(RequestError, match=message):
        make_windowed(windows=MOVING, cache=request.options.cache)


@pytest.mark.slow  # several loop runs
def test_a_run_in_windows_can_be_calibrated(open_pair, make_windowed):
    def ratios(windows: ContextWindows | None) -> tuple[tuple[float, ...], ...]:
        request = make_windowed(windows=windows)
        return calibrate(request, partial(run, open_pair()), source="a test").ratios

    assert ratios(ContextWindows(frames=FRAMES, overlap=0)) == ratios(None)
    moving, still = ratios(MOVING), ratios(STILL)
    assert moving != still
    assert len(moving) == len(still) == 2
    for side in (*moving, *still):
        assert [step for step, ratio in enumerate(side) if ratio == 1.0] == [0, SWITCH]
