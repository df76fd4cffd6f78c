"""Memory checks for lanes and steps, and remedies in error messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from wanstream.devices.machine.available_ram import ESTIMATE_MARGIN
from wanstream.sampling import check_room, denoise, working_bytes
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.sampling.loop.memory import tokens_of
from wanstream.sampling.loop.oom_fallback import LATENT_COPIES, RunPolicy
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair

CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)
LARGE = (16, 5, 128, 160)
"""Latents with 25600 tokens, so chunks make a difference."""

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def needed(pair: ExpertPair, samples: int, *, guided: bool = True, chunk: int | None = None) -> int:
    """Return the bytes for a run with two buffers."""
    working = working_bytes(
        pair, (samples, *LARGE), sides=(0, 0) if guided else (0,), chunk_tokens=chunk
    )
    return working + pair.device_bytes(LAYERWISE, device=CPU)


@pytest.fixture
def lanes(make_request: Request) -> Callable[..., DenoiseRequest]:
    def lanes(batch: int, **changes: Any) -> DenoiseRequest:
        text = torch.zeros(1, 4, 4096)
        noise = torch.zeros(1, *LARGE).expand(batch, *LARGE)
        return make_request(noise=noise, positive=text, negative=text, **changes)

    return lanes


@pytest.mark.parametrize(
    "policy", [LAYERWISE, OffloadPolicy.resident(), OffloadPolicy.block_swap(1, 3)], ids=str
)
def test_what_fits_under_the_smallest_policy_is_let_through(
    policy: OffloadPolicy, open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair = open_pair()
    enough = needed(pair, 4, chunk=2048)
    assert enough < needed(pair, 4)
    check_room(pair, lanes(4), policy, CPU, free=enough)
    with pytest.raises(
        InsufficientMemoryError, match=r"4 videos at once need .* 3 of them would fit: use 3 lanes"
    ):
        check_room(pair, lanes(4), policy, CPU, free=enough - 1)


def test_what_a_cache_keeps_needs_room_too(
    open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair, cache = open_pair(), FirstBlockCache()
    enough, state = needed(pair, 2, chunk=2048), (5 * 64 * 80) * 256 * 4  # tokens x width x fp32
    check_room(pair, lanes(2), LAYERWISE, CPU, free=enough)
    kept = cache.cached_states * 4 * state
    check_room(pair, lanes(2, cache=cache), LAYERWISE, CPU, free=enough + kept)
    with pytest.raises(InsufficientMemoryError, match="1 of them would fit"):
        check_room(pair, lanes(2, cache=cache), LAYERWISE, CPU, free=enough + kept - 1)


@pytest.mark.parametrize("fitting", [1, 2, 3])
def test_the_number_that_fits_is_told(
    fitting: int, open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair = open_pair()
    free = needed(pair, fitting, chunk=2048)
    check_room(pair, lanes(fitting), LAYERWISE, CPU, free=free)
    with pytest.raises(
        InsufficientMemoryError, match=f"{fitting} of them would fit: use {fitting} lanes"
    ):
        check_room(pair, lanes(5), LAYERWISE, CPU, free=free)


def test_the_numbers_are_those_of_a_run(
    open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair = open_pair()
    working = working_bytes(pair, (8, *LARGE), sides=(0, 0), chunk_tokens=2048)
    weights = pair.device_bytes(LAYERWISE, device=CPU)
    with pytest.raises(InsufficientMemoryError) as refused:
        check_room(pair, lanes(8), LAYERWISE, CPU, free=20_000_000)
    said = str(refused.value)
    assert f"8 videos at once need {working / 1e9:.2f} GB of working memory" in said
    assert (
        f"and {weights / 1e6:.2f} MB for weights" in said
        or f"and {weights / 1e9:.2f} GB for weights" in said
    )
    assert (
        "0.02 GB are free for both. Not even one of them would fit: make the video smaller or "
        "shorter" in said
    )
    assert isinstance(refused.value, torch.OutOfMemoryError), "hosts free other models for it"


def test_lanes_without_guidance_take_half(
    open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair = open_pair()
    free = needed(pair, 4, guided=False, chunk=2048)
    check_room(pair, lanes(4, guidance=(1.0, 1.0)), LAYERWISE, CPU, free=free)
    with pytest.raises(InsufficientMemoryError):
        check_room(pair, lanes(4, guidance=(1.0, 3.0)), LAYERWISE, CPU, free=free)


@pytest.mark.parametrize(("side", "on_positive"), [("tokens", 1), ("negative_tokens", 0)])
def test_tokens_next_to_the_video_take_room(
    side: str, on_positive: int, open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    """On both sides, a video-sized context takes the room of a video twice as long."""
    pair, context = (
        open_pair(),
        ExtraTokens(context=(torch.zeros(1, 1, 1, 1, 1).expand(1, *LARGE),)),
    )
    channels, frames, *size = LARGE
    twice = working_bytes(pair, (2, channels, 2 * frames, *size), sides=(0, 0), chunk_tokens=2048)
    tokens = tokens_of((2, *LARGE))
    working = working_bytes(
        pair, (2, *LARGE), sides=(on_positive * tokens, tokens), chunk_tokens=2048
    )
    assert (working == twice) if on_positive else (working < twice)
    enough = working + pair.device_bytes(LAYERWISE, device=CPU)
    assert enough > needed(pair, 2, chunk=2048)
    check_room(pair, lanes(2, **{side: context}), LAYERWISE, CPU, free=enough)
    with pytest.raises(InsufficientMemoryError, match="1 of them would fit"):
        check_room(pair, lanes(2, **{side: context}), LAYERWISE, CPU, free=enough - 1)


def test_one_video_is_always_tried(
    open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    check_room(open_pair(), lanes(1), LAYERWISE, CPU, free=0)


def test_no_prefetch_asks_for_one_buffer(
    open_pair: OpenPair, lanes: Callable[..., DenoiseRequest]
) -> None:
    pair, none_ahead = open_pair(), OffloadPolicy.layerwise(0)
    free = needed(pair, 2, chunk=2048) - 1
    check_room(pair, lanes(2), none_ahead, CPU, free=free)
    with pytest.raises(InsufficientMemoryError):
        check_room(pair, lanes(2), LAYERWISE, CPU, free=free)


def test_this_machine_has_room_for_tiny_lanes(open_pair: OpenPair, make_request: Request) -> None:
    check_room(open_pair(), make_request(batch=4), LAYERWISE, CPU)


def estimate(
    pair: ExpertPair,
    *,
    guided: bool = True,
    chunk: int | None = None,
    shape: Sequence[int] = (1, *LARGE),
) -> int:
    working = working_bytes(pair, shape, sides=(0, 0) if guided else (0,), chunk_tokens=chunk)
    return working + pair.device_bytes(LAYERWISE, device=CPU) + LATENT_COPIES * prod(shape) * 4


def refuse(
    pair: ExpertPair, policy: OffloadPolicy, *, available: int, device: torch.device = CPU
) -> None:
    RunPolicy(pair, policy, device, shape=(1, *LARGE), sides=(0, 0)).refuse_without_ram(
        available=available
    )


def test_a_run_on_a_cpu_is_refused_where_it_surely_takes_more_ram_than_there_is(
    open_pair: OpenPair,
) -> None:
    pair = open_pair()
    needs = estimate(pair)
    refuse(pair, LAYERWISE, available=int(needs / ESTIMATE_MARGIN) + 1)
    with pytest.raises(InsufficientMemoryError) as refused:
        refuse(pair, LAYERWISE, available=int(needs / ESTIMATE_MARGIN) - 1)
    weights = pair.device_bytes(LAYERWISE, device=CPU)
    assert f"needs about {(needs - weights) / 1e9:.2f} GB of RAM in addition to" in str(
        refused.value
    )
    assert f"and {needs / ESTIMATE_MARGIN / 1e9:.2f} GB are free (swap included)" in str(
        refused.value
    )
    assert "Choose Wan Auto Offload, which computes fewer tokens at once" in str(refused.value)
    refuse(pair, replace(LAYERWISE, chunk_tokens=2048), available=int(needs / 1.2))


def test_what_another_policy_keeps_in_ram_is_given_back_before_ram_is_counted(
    open_pair: OpenPair, make_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, request = open_pair(), make_request(batch=1)
    denoise(pair, request, policy=LAYERWISE, device="cpu")
    without = pair.host_bytes
    denoise(pair, request, policy=OffloadPolicy.layerwise(1, source="pinned"), device="cpu")
    kept = pair.host_bytes - without
    needed = working_bytes(pair, request.computed_shape, sides=(0, 0), chunk_tokens=None)
    # Just enough once the former policy's blocks are freed.
    left = needed + LATENT_COPIES * prod(request.computed_shape) * 4

    def memory() -> SimpleNamespace:
        return SimpleNamespace(available=left - (pair.host_bytes - without))

    monkeypatch.setattr(psutil, "virtual_memory", memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    assert left - kept < left / ESTIMATE_MARGIN, "the test has blocks that matter"
    denoise(pair, request, policy=LAYERWISE, device="cpu")
    assert pair.host_bytes == without


def test_where_no_policy_fits_the_video_must_be_smaller(open_pair: OpenPair) -> None:
    pair = open_pair()
    with pytest.raises(
        InsufficientMemoryError, match="Make the video smaller or shorter, or use context windows"
    ):
        refuse(pair, LAYERWISE, available=estimate(pair, chunk=2048) // 2)


def test_what_a_gpu_has_no_room_for_is_tried_in_less(open_pair: OpenPair) -> None:
    refuse(open_pair(), LAYERWISE, device=torch.device("cuda"), available=0)


def test_a_video_that_no_machine_has_ram_for_is_refused_before_its_first_block(
    open_pair: OpenPair, make_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096x4096x1025: 16.8 million tokens take some 200 GB in experts 256 wide."""
    pair, size = open_pair(), (1, 16, 257, 512, 512)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=25 * 10**9))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=10**9))
    request = make_request(noise=torch.zeros(1).expand(size))
    with pytest.raises(
        InsufficientMemoryError, match=r"needs about \d\d\d\.\d\d GB of RAM .* GB are free"
    ):
        denoise(pair, request, policy=LAYERWISE, device="cpu")
    assert not pair.running
