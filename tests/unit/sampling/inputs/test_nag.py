"""Runs with NAG: affected steps, cost, and results that must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wanstream.sampling.steps import RequestError, StepProgress
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.sampling.runs import (
    MakeRequest,
    block_calls,
    changed_request,
    latents_of,
    run,
)
from wanstream.wan import Nag

NAG = Nag(scale=5.0, tau=1.5, alpha=0.5)


@pytest.fixture
def make_nag(make_request: MakeRequest) -> MakeRequest:
    """`make_nag(**changes)`: an unguided request with NAG, 3 steps, 1 of them high-noise."""
    given = {"steps": 3, "switch_step": 1, "guidance": (1.0, 1.0), "nag": NAG}
    return lambda **changes: make_request(**{**given, **changes})


def test_it_changes_a_run_as_the_negative_text_wants(open_pair, make_nag):
    pair = open_pair(layers=2)
    request = make_nag()
    off = latents_of(pair, make_nag(nag=None))
    on = latents_of(pair, request)
    other = latents_of(pair, changed_request(request, negative=-request.negative))
    assert torch.equal(latents_of(pair, make_nag(nag=Nag(alpha=0.0))), off)
    assert not torch.allclose(off, on, rtol=1e-3)
    assert not torch.allclose(on, other, rtol=1e-3)
    windows = ContextWindows(frames=2, overlap=0)
    assert torch.equal(latents_of(pair, make_nag(windows=windows)), on)


def test_one_lane_does_the_work_and_no_byte_more_is_moved(open_pair, make_nag):
    def cost(**changes: Any) -> tuple[int, list[int], int]:
        pair = open_pair()
        calls = block_calls(pair)
        timeline = run(pair, make_nag(**changes)).timeline
        moved = [step.bytes_moved for step in timeline.steps]
        return len(calls), moved, timeline.non_block_bytes

    off = cost(nag=None)
    on = cost()
    guided = cost(guidance=(4.0, 3.0), nag=None)
    assert on[:2] == off[:2]
    assert (on[0], guided[0]) == (3, 6)
    assert on[2] == guided[2] > 0, "both texts are embedded before the first step"


def test_guided_steps_are_left_alone(open_pair, make_nag):
    def steps(**changes: Any) -> list[torch.Tensor]:
        progress: list[StepProgress] = []
        run(pair, make_nag(**changes), on_step=progress.append)
        return [step.denoised for step in progress]

    pair = open_pair()
    off, on = (steps(guidance=(4.0, 1.0), nag=nag) for nag in (None, NAG))
    assert [*map(torch.equal, off, on)] == [True, False, False]
    assert all(map(torch.equal, steps(guidance_steps=(4.0, 1.0)), on))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negative": None}, "NAG needs a negative text"),
        ({"guidance": (4.0, 3.0)}, "NAG acts in steps of guidance 1, and this run has none"),
        ({"guidance": (4.0, 1.0), "end_step": 1}, "this run has none"),
    ],
)
def test_a_run_without_an_effect_is_refused(changes, message, make_nag):
    with pytest.raises(RequestError, match=message):
        make_nag(**changes)
