"""Model-call steps in ComfyUI's samplers: guidance, windows, lanes, refused settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.host.comfy.experts.guider_steps import GuiderSteps
from wanstream.host.models import GuiderSettings
from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling.cache import FirstBlockCache, MagCache, MagTable
from wanstream.sampling.inputs import RequestOptions
from wanstream.sampling.steps import Guidance, RequestError
from wanstream.shapes.context_windows import ContextWindows
from wanstream.wan import Nag

SIGMAS = (1.0, 0.9, 0.6, 0.3, 0.0)
PAIR = GuiderSettings(boundary_ratio=0.8, guidance=Guidance(scales=(4.0, 3.0)))
ONE = GuiderSettings(boundary_ratio=0.0, guidance=Guidance(scales=(5.0, 5.0)))
WINDOWS = ContextWindows(frames=3, overlap=1)


def guider_steps(settings=PAIR, sigmas=SIGMAS, **changes):
    levels = changes.pop("levels", sigmas[:-1])
    options = {name: changes.pop(name) for name in ("cache", "windows") if name in changes}
    changed = replace(settings, **changes, options=RequestOptions(**options))
    return GuiderSteps(settings=changed, sigmas=sigmas, shape=(2, 16, 7, 8, 6), levels=levels)


def guided(**settings) -> Guidance:
    return replace(PAIR.guidance, **settings)


def mag_cache(steps: int = 4) -> MagCache:
    experts = ("high", "high", "low", "low")[:steps]
    ratios = ((1.0, 0.9, 0.9, 0.9)[:steps],) * 2
    table = MagTable(sigmas=SIGMAS[: steps + 1], experts=experts, ratios=ratios, marks={})
    return MagCache(table=table, rule=SkipRule(threshold=1.0))


def test_call_belongs_to_the_last_step_whose_level_it_reached():
    steps = guider_steps()
    for sigma, step in ((1.0, 0), (0.95, 0), (0.9, 1), (0.9 + 1e-6, 1), (0.7, 1), (0.6, 2)):
        assert steps.step(sigma) == step
    assert (steps.step(0.01), steps.step(1.2)) == (3, 0)
    rising = guider_steps(sigmas=(0.1, 0.4, 0.8, 1.0))
    assert [rising.step(sigma) for sigma in (0.1, 0.2, 0.5, 0.9)] == [0, 0, 1, 2]


def test_guidance_is_that_of_the_expert_or_of_the_step():
    levels = (1.0, 0.95, 0.9, 0.6, 0.3, 0.1)
    assert [guider_steps().scale(level) for level in levels] == [4, 4, 4, 3, 3, 3]
    listed = guider_steps(guidance=guided(steps=(6.0, 5.0, 1.0)), levels=levels)
    assert [listed.scale(level) for level in levels] == [6, 6, 5, 1, 1, 1]
    early = guider_steps(guidance=guided(steps=(6.0, 1.0)), levels=levels)
    for each in (listed, early):  # a call with negative lanes is enough
        assert each.sides == {"high": (0, 1), "low": (0,)}
    held = guider_steps(guidance=guided(steps=(6.0, 5.0, 1.0), nag=Nag()), levels=levels)
    for each, low in ((listed, False), (held, True)):
        assert {expert: reads for expert, _, reads in each.ahead} == {"high": True, "low": low}
    one = guider_steps(ONE)
    assert [stage.expert for stage, _ in one.calls.values()] == ["high"] * 4
    assert one.sides == {"high": (0, 1), "low": (0,)}


def test_calls_of_a_step_have_its_windows_and_lanes():
    expected = ((1.0, 0, 2), (0.95, 0, 2), (0.9, 1, 1), (0.8, 1, 1), (0.3, 3, 1))
    levels = [level for level, _, _ in expected]
    listed = guider_steps(guidance=guided(steps=(6.0, 1.0)), windows=WINDOWS, levels=levels)
    for (level, step, sides), (_, names) in zip(expected, listed.calls.values(), strict=True):
        pieces = WINDOWS.at(step, 7)
        assert listed.windows(level).frames == pieces
        assert [name.frames for name in names] == [*pieces] * 2 * sides
        lanes = {(side, sample) for side in range(sides) for sample in range(2)}
        assert {(name.side, name.sample) for name in names} == lanes
    most = max(len(WINDOWS.at(step, 7)) for step in range(4))
    assert listed.computed_shape == (2 * most, 16, 3, 8, 6)
    assert guider_steps().windows(1.0) is None
    assert guider_steps().computed_shape == (2, 16, 7, 8, 6)


CONTEXT = r"context_guidance is 1.5, which Wan Guider does not apply.* to 1 in"
NO_STEP = "NAG acts in steps of guidance 1, and this run has none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance": guided(steps=(4.0,) * 5)}, "guidance_steps has 5 numbers for 4 steps"),
        ({"guidance": guided(context=1.5)}, CONTEXT),
        ({"guidance": guided(nag=Nag())}, NO_STEP),
        ({"windows": ContextWindows(frames=8, overlap=0)}, "longer than the video"),
        ({"cache": mag_cache(3)}, "calibrated for 3 steps, this run has 4"),
        ({"cache": mag_cache(), "windows": WINDOWS}, "shift in every step"),
        ({"boundary_ratio": 1.5}, r"boundary ratio 1\.5: give 0 to 1"),
    ],
)
def test_settings_that_do_not_fit_the_steps_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        guider_steps(**changes)


@pytest.mark.parametrize("sigmas", [(0.5,), ()])
def test_run_without_steps_refuses_nothing(sigmas):
    """BasicScheduler returns such sigmas for a denoise of 0."""
    assert guider_steps(sigmas=sigmas, guidance=guided(nag=Nag()), windows=WINDOWS).steps < 1


def test_magnitudes_need_one_call_for_each_step():
    known = guider_steps(cache=mag_cache())
    known.check_calls(SIGMAS[:-1], "euler")
    known.check_call(2, 0.6)
    for asked in (None, (1.0, 0.9, 0.9, 0.6), (1.0, 0.9, 0.6), (1.0, 0.8, 0.6, 0.3)):
        with pytest.raises(RequestError, match="calibrated with one model call in each of 4 steps"):
            known.check_calls(asked, "heun")
    for call, sigma in ((2, 0.9), (4, 0.1)):
        with pytest.raises(RequestError, match=f"model call {call} is at noise level"):
            known.check_call(call, sigma)
    asks = guider_steps(cache=FirstBlockCache())
    asks.check_calls(None, "heun")
    asks.check_call(7, 0.5)
