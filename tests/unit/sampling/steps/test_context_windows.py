"""Runs with context windows, compared with windows computed one by one, and with no windows."""

from dataclasses import replace

import pytest
import torch

from wanstream.sampling import request_run_shape
from wanstream.sampling.loop.memory import check_room, tokens_of, working_bytes
from wanstream.sampling.steps.errors import InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.sampling.plain_loop import windowed_loop
from wanstream.tests.support.sampling.runs import (
    CPU,
    LAYERWISE,
    block_calls,
    changed_request,
    latents_of,
    normal,
    run,
)

FRAMES = 7
BF16 = torch.bfloat16
FP32 = torch.float32
WINDOWS = ContextWindows(frames=3, overlap=1)
IMAGE = normal(1, 20, FRAMES, 4, 6, seed=21)


@pytest.fixture
def make_long(make_request):
    """Request with 7 latent frames, by default in 3-frame windows."""

    def make(*, batch=1, **changes):
        noise = normal(batch, 16, FRAMES, 4, 6, seed=20)
        return make_request(**{"batch": batch, "noise": noise, "windows": WINDOWS, **changes})

    return make


@pytest.mark.parametrize(
    ("blend", "dtype", "changes"),
    [("pyramid", BF16, {}), ("flat", FP32, {"batch": 2, "image_condition": IMAGE})],
)
def test_one_window_of_all_frames_is_no_window(blend, dtype, changes, open_pair, make_long):
    pair = open_pair(dtype=dtype, in_channels=36 if "image_condition" in changes else 16)
    request = make_long(windows=None, steps=2, switch_step=1, **changes)
    windows = ContextWindows(frames=FRAMES, overlap=2, stride=4, blend=blend)
    one = changed_request(request, windows=windows)
    assert torch.equal(latents_of(pair, one), latents_of(pair, request))


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("windows", "image"),
    [
        (WINDOWS, None),
        (ContextWindows(frames=3, overlap=2, stride=2, blend="pyramid"), None),
        (replace(WINDOWS, blend="flat"), IMAGE),
        (replace(WINDOWS, repeat_image=False), IMAGE),
    ],
    ids=str,
)
def test_windows_are_single_passes_put_together(windows, image, open_pair, plain_models, make_long):
    """The start image is seen by every window or by the first."""
    channels = 16 if image is None else 36
    request = make_long(windows=windows, image_condition=image)
    found = latents_of(open_pair(in_channels=channels), request)
    expected = windowed_loop(plain_models(in_channels=channels), request)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_move_once_for_all_windows(open_pair, make_long):
    def moved(request):
        with open_pair() as pair:
            calls = block_calls(pair)
            steps = run(pair, request).timeline.steps
        return len(calls), [step.bytes_moved for step in steps]

    whole = moved(make_long(windows=None))
    windowed = moved(make_long())
    assert windowed[1] == whole[1]
    assert sum(windowed[1]) > 0
    assert windowed[0] == sum(make_long().lanes_at(step) for step in range(5)) > whole[0] == 10


def test_memory_and_time_are_estimated_by_windows(open_pair, make_long):
    pair = open_pair()
    request = make_long(batch=2)
    most = max(len(WINDOWS.at(step, FRAMES)) for step in range(5))
    assert request.computed_shape == (2 * most, 16, 3, 4, 6)
    assert make_long(windows=None).computed_shape == (1, 16, FRAMES, 4, 6)
    shape = request_run_shape(pair, request, CPU)
    assert shape.tokens == tokens_of((1, 16, 3, 4, 6))
    assert shape.lanes == {"high": 4 * most, "low": 4 * most}
    for step in range(5):
        assert len(shape.lane_tokens_of_step(step)) == 2 * request.lanes_at(step)
    needed = working_bytes(pair, request.computed_shape, sides=(0, 0))
    room = pair.device_bytes(OffloadPolicy.layerwise(0), device=CPU)
    check_room(pair, request, LAYERWISE, CPU, free=room + 2 * needed)
    with pytest.raises(InsufficientMemoryError, match="2 videos at once"):
        check_room(pair, request, LAYERWISE, CPU, free=room + needed // 2)
