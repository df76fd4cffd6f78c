"""A step's lanes: number, names and contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from wanstream.sampling.cache.base import LaneName, count_texts, names_of
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.loop.lanes import LaneInputs, lane_names, names_at, windows_at
from wanstream.shapes.context_windows import ContextWindows

WINDOWS = ContextWindows(frames=3, overlap=1)

Request = Callable[..., DenoiseRequest]


@pytest.fixture
def request_in_windows(make_request: Request) -> DenoiseRequest:
    return make_request(
        batch=2, noise=torch.randn(2, 16, 7, 4, 6), windows=WINDOWS, guidance=(4.0, 1.0)
    )


def test_a_lane_is_called_by_its_text_its_video_and_its_frames(
    request_in_windows: DenoiseRequest,
) -> None:
    inputs = LaneInputs(request_in_windows, torch.device("cpu"))
    for step, sides in ((0, 2), (1, 2), (2, 1)):
        windows = windows_at(request_in_windows, step)
        lanes = inputs.lanes(request_in_windows.noise, range(sides), windows=windows)
        pieces = WINDOWS.at(step, 7)
        expected = [
            LaneName(side, sample, piece)
            for side in range(sides)
            for sample in (0, 1)
            for piece in pieces
        ]
        assert list(names_of(lanes)) == list(names_at(request_in_windows, step)) == expected
        assert count_texts(expected) == 2 * sides
        for lane, name in zip(lanes, expected, strict=True):
            assert torch.equal(
                lane.latents, request_in_windows.noise[name.sample, :, list(name.frames)][None]
            )
            texts = request_in_windows.negative if name.side else request_in_windows.positive
            assert torch.equal(lane.text, texts[name.sample][None])


def test_a_whole_video_has_a_lane_for_each_text() -> None:
    assert lane_names(2, (0, 1)) == ((0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None))
    assert lane_names(1, (0,)) == ((0, 0, None),)


def test_only_positive_lanes_hold_the_negative_text(make_request: Request) -> None:
    request = make_request()
    inputs = LaneInputs(request, torch.device("cpu"))
    positive, negative = inputs.lanes(request.noise, (0, 1), attach_nag=True)
    assert torch.equal(positive.negative_text, request.negative)
    assert negative.negative_text is None
    (alone,) = inputs.lanes(request.noise, (0,))
    assert alone.negative_text is None
