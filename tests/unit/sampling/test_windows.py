"""Runs with context windows, compared with windows computed one by one, and with no windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.nodes.runs.benchmark import describe_request
from wanstream.sampling import denoise, request_run_shape
from wanstream.sampling.inputs import DenoiseRequest, merge_requests, split_request
from wanstream.sampling.loop.memory import check_room, tokens_of, working_bytes
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.errors import InsufficientMemoryError
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair

LAYERWISE = OffloadPolicy.layerwise(1)
CPU = torch.device("cpu")
FRAMES = 7
WINDOWS = ContextWindows(frames=3, overlap=1)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_long(make_request: Request) -> Request:
    """Request with 7 latent frames, by default in 3-frame windows."""

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        noise = normal(batch, 16, FRAMES, 4, 6, seed=20)
        return make_request(**{"batch": batch, "noise": noise, "windows": WINDOWS, **changes})

    return make


def latents_of(pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=LAYERWISE, device="cpu").latents


@torch.inference_mode()
def one_by_one(
    models: Mapping[str, WanTransformer3DModel], request: DenoiseRequest
) -> torch.Tensor:
    """Reference loop: whole models, one forward pass per window and prompt, guided, blended."""
    assert request.options.windows is not None
    step_plan, latents = request.step_plan, request.noise
    solver = Solver(request.solver, step_plan.schedule)
    for step in step_plan.steps:
        model, scale = models[step_plan.experts[step]], step_plan.guidance[step]
        time = torch.tensor([step_plan.schedule.timesteps[step]])
        windows = request.options.windows.at(step, FRAMES)
        total = torch.zeros_like(latents)
        for window, weights in zip(
            windows, request.options.windows.weights(windows, FRAMES), strict=True
        ):
            seen = latents[:, :, list(window)]
            if request.inputs.image_condition is not None:
                image = request.inputs.image_condition[:, :, list(window)]
                if request.options.windows.repeat_image:
                    image[:, :, 0] = request.inputs.image_condition[:, :, 0]
                seen = torch.cat([seen, image], dim=1)
            positive = model(seen, time, request.positive, return_dict=False)[0]
            negative = model(seen, time, request.negative, return_dict=False)[0]
            total[:, :, list(window)] += (negative + scale * (positive - negative)) * torch.tensor(
                weights
            )[:, None, None]
        latents = solver.step(total, latents)
    return latents


@pytest.mark.parametrize(
    ("blend", "dtype", "solver"),
    [
        ("linear", torch.float32, "unipc"),
        ("pyramid", torch.bfloat16, "unipc"),
        ("flat", torch.float32, "euler"),
    ],
)
def test_one_window_of_all_frames_is_no_window_to_the_bit(
    blend: str, dtype: torch.dtype, solver: str, open_pair: OpenPair, make_long: Request
) -> None:
    pair, request = open_pair(dtype=dtype), make_long(solver=solver, windows=None)
    one = changed_request(
        request, windows=ContextWindows(frames=FRAMES, overlap=2, stride=4, blend=blend)
    )
    assert torch.equal(latents_of(pair, one), latents_of(pair, request))


@pytest.mark.slow  # several loop runs
def test_one_window_of_all_frames_with_an_image_and_a_batch_too(
    open_pair: OpenPair, make_long: Request
) -> None:
    pair = open_pair(in_channels=36)
    request = make_long(batch=2, windows=None, image_condition=normal(1, 20, FRAMES, 4, 6, seed=21))
    one = changed_request(request, windows=ContextWindows(frames=FRAMES, overlap=0))
    assert torch.equal(latents_of(pair, one), latents_of(pair, request))


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    "windows", [WINDOWS, ContextWindows(frames=3, overlap=2, stride=2, blend="pyramid")]
)
def test_windows_are_forwards_of_their_own_put_together(
    windows: ContextWindows, open_pair: OpenPair, plain_models: Any, make_long: Request
) -> None:
    request = make_long(windows=windows)
    torch.testing.assert_close(
        latents_of(open_pair(), request), one_by_one(plain_models(), request), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("repeat_image", [True, False])
def test_the_start_image_is_seen_by_every_window_or_by_the_first(
    repeat_image: bool, open_pair: OpenPair, plain_models: Any, make_long: Request
) -> None:
    request = make_long(
        windows=replace(WINDOWS, repeat_image=repeat_image),
        image_condition=normal(1, 20, FRAMES, 4, 6, seed=21),
    )
    expected = one_by_one(plain_models(in_channels=36), request)
    torch.testing.assert_close(
        latents_of(open_pair(in_channels=36), request), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow  # several loop runs
def test_windows_change_the_result(open_pair: OpenPair, make_long: Request) -> None:
    pair = open_pair()
    ends = [
        latents_of(pair, make_long(windows=each))
        for each in (None, WINDOWS, replace(WINDOWS, blend="flat"))
    ]
    assert not torch.allclose(ends[0], ends[1])
    assert not torch.allclose(ends[1], ends[2])


def test_weights_move_once_for_all_windows(open_pair: OpenPair, make_long: Request) -> None:
    def moved(request: DenoiseRequest) -> tuple[int, list[int]]:
        calls = list[int]()
        with open_pair() as pair:
            for name in ("high", "low"):
                block = pair.engine(LAYERWISE, CPU).models[name].blocks[0]
                block.register_forward_hook(lambda *_: calls.append(1))
            timeline = denoise(pair, request, policy=LAYERWISE, device="cpu").timeline
        return len(calls), [step.bytes_moved for step in timeline.steps]

    whole_calls, whole = moved(make_long(windows=None))
    calls, windowed = moved(make_long())
    assert windowed == whole
    assert sum(windowed) > 0
    expected = sum(make_long().lanes_at(step) for step in range(5))
    assert calls == expected > whole_calls == 10


@pytest.mark.slow  # several loop runs
def test_samples_of_a_batch_are_single_runs_to_the_bit(
    open_pair: OpenPair, make_long: Request
) -> None:
    pair, request = open_pair(), make_long(batch=2, guidance=(4.0, 1.0))
    together = latents_of(pair, request)
    parts = split_request(request, [1, 1])
    assert [part.options.windows for part in parts] == [WINDOWS] * 2
    for part, sample in zip(parts, together, strict=True):
        assert torch.equal(latents_of(pair, part)[0], sample)
    assert merge_requests(parts).options.windows == WINDOWS


def test_videos_of_other_windows_are_not_joined(make_long: Request) -> None:
    first = make_long()
    with pytest.raises(RequestError, match="context windows None, in lane 1 ContextWindows"):
        merge_requests([first, changed_request(first, windows=None)])


def test_memory_and_time_are_estimated_by_windows(open_pair: OpenPair, make_long: Request) -> None:
    pair, request = open_pair(), make_long(batch=2)
    most = max(len(WINDOWS.at(step, FRAMES)) for step in range(5))
    assert request.computed_shape == (2 * most, 16, 3, 4, 6)
    assert make_long(windows=None).computed_shape == (1, 16, FRAMES, 4, 6)
    run = request_run_shape(pair, request, CPU)
    assert run.tokens == tokens_of((1, 16, 3, 4, 6))
    assert run.lanes == {"high": 4 * most, "low": 4 * most}
    assert [len(run.lane_tokens_of_step(step)) for step in range(5)] == [
        2 * request.lanes_at(step) for step in range(5)
    ]
    needed = working_bytes(pair, request.computed_shape, sides=(0, 0))
    room = pair.device_bytes(OffloadPolicy.layerwise(0), device=CPU)
    check_room(pair, request, LAYERWISE, CPU, free=room + 2 * needed)
    with pytest.raises(InsufficientMemoryError, match="2 videos at once"):
        check_room(pair, request, LAYERWISE, CPU, free=room + needed // 2)


def test_windows_longer_than_the_video_are_refused(make_long: Request) -> None:
    with pytest.raises(
        RequestError, match=r"windows of 29 frames \(8 latent\) are longer than the video of 25"
    ):
        make_long(windows=ContextWindows(frames=8, overlap=0))


def test_a_report_says_the_windows(make_long: Request) -> None:
    assert (
        describe_request(make_long())["Context windows"]
        == "9 frames, 1 latent frames shared, linear"
    )
    assert describe_request(make_long(windows=replace(WINDOWS, shift_windows=False)))[
        "Context windows"
    ].endswith("at fixed positions")
    assert "Context windows" not in describe_request(make_long(windows=None))
