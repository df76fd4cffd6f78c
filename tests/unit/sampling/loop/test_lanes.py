"""A step's lanes: number, names and contents."""

from itertools import product

import torch

from wanstream.sampling.cache.base import LaneName, count_texts, names_of
from wanstream.sampling.loop.lanes import LaneInputs, lane_names, names_at, windows_at
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.sampling.runs import CPU

WINDOWS = ContextWindows(frames=3, overlap=1)


def test_lanes_have_names_of_text_sample_and_frames(make_request):
    noise = torch.randn(2, 16, 7, 4, 6)
    request = make_request(batch=2, noise=noise, windows=WINDOWS, guidance=(4.0, 1.0))
    inputs = LaneInputs(request, CPU)
    for step, sides in ((0, 2), (1, 2), (2, 1)):
        windows = windows_at(request, step)
        pieces = WINDOWS.at(step, 7)
        lanes = inputs.lanes(noise, range(sides), windows=windows)
        expected = [LaneName(*name) for name in product(range(sides), range(2), pieces)]
        assert list(names_of(lanes)) == list(names_at(request, step)) == expected
        assert count_texts(expected) == 2 * sides
        for lane, name in zip(lanes, expected, strict=True):
            assert torch.equal(lane.latents, noise[name.sample, :, list(name.frames)][None])
            texts = request.negative if name.side else request.positive
            assert torch.equal(lane.text, texts[name.sample][None])


def test_a_whole_video_has_a_lane_for_each_text():
    assert lane_names(2, (0, 1)) == ((0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None))
    assert lane_names(1, (0,)) == ((0, 0, None),)


def test_only_positive_lanes_hold_the_negative_text(make_request):
    request = make_request()
    inputs = LaneInputs(request, CPU)
    positive, negative = inputs.lanes(request.noise, (0, 1), attach_nag=True)
    assert torch.equal(positive.negative_text, request.negative)
    assert negative.negative_text is None
    (alone,) = inputs.lanes(request.noise, (0,))
    assert alone.negative_text is None
