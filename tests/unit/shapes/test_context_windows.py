"""Context windows: each window's frames and blend weights."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.shapes.context_windows import BLENDS, ContextWindows, van_der_corput


@st.composite
def cases(draw: st.DrawFn) -> tuple[ContextWindows, int, int]:
    frames = draw(st.integers(2, 24))
    overlap = draw(st.integers(0, frames - 1))
    stride, blend = draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from(sorted(BLENDS))))
    windows = ContextWindows(frames=frames, overlap=overlap, stride=stride, blend=blend)
    return windows, draw(st.integers(frames, 80)), draw(st.integers(0, 1000))


@settings(max_examples=200)
@given(cases())
def test_windows_cover_every_frame_and_neighbours_overlap(case):
    windows, frames, step = case
    every = windows.at(step, frames)
    assert len(set(every)) == len(every)
    near = [window for window in every if window[1] == window[0] + 1]
    assert {frame for window in near for frame in window} == set(range(frames))
    for window in every:
        assert len(window) == windows.frames
        assert 0 <= window[0] <= window[-1] < frames
        apart = {after - before for before, after in pairwise(window)}
        assert len(apart) <= 1
        assert apart <= {1, 2, 4}
    for before, after in pairwise(near):
        assert 0 < after[0] - before[0] <= windows.frames - windows.overlap


@settings(max_examples=200)
@given(cases())
def test_weights_of_a_frame_add_up_to_one(case):
    windows, frames, step = case
    every = windows.at(step, frames)
    weights_of = defaultdict[int, list[float]](list)
    for window, weights in zip(every, windows.weights(every, frames), strict=True):
        for frame, weight in zip(window, weights, strict=True):
            assert 0 < weight <= 1
            weights_of[frame].append(weight)
    assert [sum(weights_of[frame]) for frame in range(frames)] == pytest.approx([1.0] * frames)
    assert all(weights == [1.0] for weights in weights_of.values() if len(weights) == 1)


def test_window_of_all_frames_is_the_only_one():
    windows = ContextWindows(frames=21, stride=4)
    for step in range(9):
        assert windows.at(step, 21) == (tuple(range(21)),)
    assert windows.weights(windows.at(0, 21), 21) == [[1.0] * 21]


def test_offset_changes_from_step_to_step():
    windows = ContextWindows()
    assert [[window[0] for window in windows.at(step, 61)] for step in range(5)] == [
        [0, 17, 34, 40],
        [0, 8, 25, 40],
        [0, 4, 21, 38, 40],
        [0, 12, 29, 40],
        [0, 2, 19, 36, 40],
    ]
    assert [float(van_der_corput(step)) for step in range(6)] == [0, 0.5, 0.25, 0.75, 0.125, 0.625]


def test_stride_adds_windows_of_every_second_frame():
    windows = ContextWindows(frames=5, overlap=1, stride=4)
    assert windows.at(0, 9) == ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8), (0, 2, 4, 6, 8))
    assert (0, 4, 8, 12, 16) in windows.at(0, 17)


def test_fuses_differ_where_windows_overlap():
    def of_first(blend: str) -> list[float]:
        windows = ContextWindows(frames=4, overlap=2, blend=blend)
        return windows.weights(windows.at(0, 6), 6)[0]

    assert of_first("flat") == pytest.approx([1, 1, 1 / 2, 1 / 2])
    assert of_first("linear") == pytest.approx([1, 1, 2 / 3, 1 / 3])
    assert of_first("pyramid") == pytest.approx([1, 1, 2 / 3, 1 / 3])
    wide = ContextWindows(frames=5, overlap=1, blend="pyramid")
    assert BLENDS["pyramid"](5, 1) == [1, 2, 3, 2, 1] != BLENDS["linear"](5, 1)
    assert wide.weights(wide.at(0, 9), 9)[0] == pytest.approx([1, 1, 1, 1, 1 / 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frames": 1, "overlap": 0}, "windows of 1 latent frames: give at least 2"),
        ({"frames": 4, "overlap": 4}, "4 latent frames cannot overlap by 4: give 0 to 3"),
        ({"overlap": -1}, "cannot overlap by -1"),
        ({"stride": 3}, "a stride of 3 latent frames: give 1, 2, 4 or another power of two"),
        ({"stride": 0}, "a stride of 0"),
        ({"blend": "cosine"}, "unknown blend 'cosine': choose one of linear, pyramid, flat"),
    ],
)
def test_invalid_windows_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ContextWindows(**given)


def test_windows_longer_than_the_video_are_refused():
    said = r"81 frames \(21 latent\) are longer than the video of 77 \(20 latent\): .* at most 77"
    with pytest.raises(ValueError, match=said):
        ContextWindows().at(0, 20)
