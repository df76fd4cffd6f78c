"""Memory of a run: room for lanes and steps, and estimates compared with live tensors.

Most forward passes run on fake tensors: operations make true-size storages and compute nothing.
Latents can be so large that small terms ignored by the estimate are negligible.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wanstream.block_kernels import EXACT, Int8Linear, Kernels, replace_linears
from wanstream.devices.machine.available_ram import ESTIMATE_MARGIN
from wanstream.offload.formats import FP8, EightBit
from wanstream.sampling import FirstBlockCache, check_room, lane_names, run_shape, working_bytes
from wanstream.sampling.cache import Stage
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.sampling.loop.memory import tokens_of
from wanstream.sampling.loop.oom_fallback import LATENT_COPIES, RunPolicy
from wanstream.sampling.steps import InsufficientMemoryError, Side
from wanstream.schema import OffloadPolicy
from wanstream.shapes import IMAGE_TOKENS, T2V_A14B, ExpertShape, KernelNeeds, VideoShape, expert
from wanstream.tests.support.offload.alive_tensors import Alive
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, run
from wanstream.tests.support.wan.blocks import with_our_blocks
from wanstream.tests.support.wan.int8_attention import kitchen
from wanstream.wan import (
    ExpertPair,
    Lane,
    Nag,
    Positions,
    TokenPart,
    changed,
    forward_lanes,
    settings_of,
)

BF16 = torch.bfloat16
FP32 = torch.float32
LARGE = (16, 5, 128, 160)
"""Latents with 25600 tokens, so chunks make a difference."""
CHUNKED = {"sides": (0, 0), "chunk_tokens": 2048}


def needed(pair: ExpertPair, samples: int, **how: Any) -> int:
    """Return the bytes for a run with two buffers, in chunks unless said otherwise."""
    working = working_bytes(pair, (samples, *LARGE), **{**CHUNKED, **how})
    return working + pair.device_bytes(LAYERWISE, device=CPU)


@pytest.fixture
def lanes(make_request):
    def lanes(batch: int, **changes: Any) -> DenoiseRequest:
        text = torch.zeros(1, 4, 4096)
        noise = torch.zeros(1, *LARGE).expand(batch, *LARGE)
        return make_request(noise=noise, positive=text, negative=text, **changes)

    return lanes


def check_limit(pair, request, enough, message, policy=LAYERWISE):
    """Check that a request is let through with so many bytes, and refused with one less."""
    check_room(pair, request, policy, CPU, free=enough)
    with pytest.raises(InsufficientMemoryError, match=message):
        check_room(pair, request, policy, CPU, free=enough - 1)


def test_lanes_that_fit_under_the_smallest_policy_pass(pair, lanes):
    message = "4 videos at once need .* 3 of them would fit: use 3 lanes"
    assert needed(pair, 4) < needed(pair, 4, chunk_tokens=None)
    for policy in (LAYERWISE, OffloadPolicy.resident()):
        check_limit(pair, lanes(4), needed(pair, 4), message, policy)


def test_a_cache_needs_room_too(pair, lanes):
    cache = FirstBlockCache()
    state = (5 * 64 * 80) * 256 * 4  # tokens x width x fp32
    enough = needed(pair, 2) + cache.cached_states * 4 * state
    check_limit(pair, lanes(2, cache=cache), enough, "1 of them would fit")


def test_unguided_lanes_and_fewer_buffers_take_less(pair, lanes):
    check_limit(pair, lanes(4, guidance=(1.0, 1.0)), needed(pair, 4, sides=(0,)), "3 of them")
    check_limit(pair, lanes(4, guidance=(1.0, 3.0)), needed(pair, 4), "3 of them")
    free = needed(pair, 2) - 1
    check_room(pair, lanes(2), OffloadPolicy.layerwise(0), CPU, free=free)


def test_a_refusal_has_the_figures_of_a_run(pair, lanes):
    working = working_bytes(pair, (8, *LARGE), **CHUNKED)
    weights = pair.device_bytes(LAYERWISE, device=CPU)
    with pytest.raises(InsufficientMemoryError) as refused:
        check_room(pair, lanes(8), LAYERWISE, CPU, free=20_000_000)
    message = str(refused.value)
    assert f"8 videos at once need {working / 1e9:.2f} GB of working memory" in message
    assert f"and {weights / 1e6:.2f} MB for weights" in message
    assert "0.02 GB are free for both. Not even one of them would fit: make the video" in message
    assert isinstance(refused.value, torch.OutOfMemoryError), "hosts free other models for it"


@pytest.mark.parametrize(("side", "on_positive"), [("tokens", 1), ("negative_tokens", 0)])
def test_tokens_next_to_the_video_take_room(side, on_positive, pair, lanes):
    """On both sides, a video-sized context takes the room of a video twice as long."""
    context = ExtraTokens(context=(torch.zeros(1).expand(1, *LARGE),))
    channels, frames, *size = LARGE
    twice = working_bytes(pair, (2, channels, 2 * frames, *size), **CHUNKED)
    tokens = tokens_of((2, *LARGE))
    sides = (on_positive * tokens, tokens)
    working = working_bytes(pair, (2, *LARGE), **{**CHUNKED, "sides": sides})
    assert (working == twice) if on_positive else (working < twice)
    enough = needed(pair, 2, sides=sides)
    assert enough > needed(pair, 2)
    check_limit(pair, lanes(2, **{side: context}), enough, "1 of them would fit")


def test_one_video_is_always_tried(open_pair, lanes, make_request):
    check_room(open_pair(), lanes(1), LAYERWISE, CPU, free=0)
    check_room(open_pair(), make_request(batch=4), LAYERWISE, CPU)  # with this machine's memory


def estimate(pair: ExpertPair, chunk: int | None = None) -> int:
    return needed(pair, 1, chunk_tokens=chunk) + LATENT_COPIES * prod(LARGE) * 4


def refuse(pair, policy, available, device=CPU):
    run_policy = RunPolicy(pair, policy, device, shape=(1, *LARGE), sides=(0, 0))
    run_policy.refuse_without_ram(available=int(available))


def test_a_cpu_run_that_surely_lacks_ram_is_refused(pair):
    needs = estimate(pair)
    weights = pair.device_bytes(LAYERWISE, device=CPU)
    limit = needs / ESTIMATE_MARGIN
    refuse(pair, LAYERWISE, limit + 1)
    refuse(pair, LAYERWISE, 0, torch.device("cuda"))  # a GPU tries with less
    refuse(pair, replace(LAYERWISE, chunk_tokens=2048), needs / 1.2)
    with pytest.raises(InsufficientMemoryError) as refused:
        refuse(pair, LAYERWISE, limit - 1)
    message = str(refused.value)
    assert f"needs about {(needs - weights) / 1e9:.2f} GB of RAM in addition to" in message
    assert f"and {limit / 1e9:.2f} GB are free (swap included)" in message
    assert "Choose Wan Auto Offload, which computes fewer tokens at once" in message
    with pytest.raises(InsufficientMemoryError, match="video smaller or shorter, or use context w"):
        refuse(pair, LAYERWISE, estimate(pair, chunk=2048) // 2)


def available(monkeypatch, nbytes, swap=0):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=nbytes()))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap))


def test_ram_of_another_policy_is_freed_before_it_is_counted(pair, make_request, monkeypatch):
    request = make_request(batch=1)
    run(pair, request)
    without = pair.host_bytes
    run(pair, request, OffloadPolicy.layerwise(1, source="pinned"))
    kept = pair.host_bytes - without
    working = working_bytes(pair, request.computed_shape, sides=(0, 0), chunk_tokens=None)
    # Just enough once the former policy's blocks are freed.
    left = working + LATENT_COPIES * prod(request.computed_shape) * 4
    assert left - kept < left / ESTIMATE_MARGIN, "the test has blocks that matter"
    available(monkeypatch, lambda: left - (pair.host_bytes - without))
    run(pair, request)
    assert pair.host_bytes == without


def test_a_huge_video_is_refused_before_its_first_block(pair, make_request, monkeypatch):
    """4096x4096x1025: 16.8 million tokens take some 200 GB in experts 256 wide."""
    noise = torch.zeros(1).expand(1, 16, 257, 512, 512)
    available(monkeypatch, lambda: 25 * 10**9, swap=10**9)
    message = r"needs about \d\d\d\.\d\d GB of RAM .* GB are free"
    with pytest.raises(InsufficientMemoryError, match=message):
        run(pair, make_request(noise=noise))
    assert not pair.running


LATENT = (5, 40, 56)
TOKENS = 5 * 20 * 28
TEXT = 512


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


def computed_in(model: torch.nn.Module, dtype: torch.dtype, chunk: int | None) -> Any:
    """Return a model with these tensors and our blocks.

    Copied fake tensors would belong to another mode.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return with_our_blocks(model, chunk_tokens=chunk)


@pytest.fixture
def make_model(fake, make_tiny_expert):
    """`make_model(dtype, chunk=None, **shape)`: fake tensors in our blocks."""

    def make(dtype: torch.dtype, *, chunk: int | None = None, **shape: int) -> Any:
        made = make_tiny_expert(**{"heads": 4, "layers": 2, "ffn_dim": 1382, **shape})
        return computed_in(made, dtype, chunk)

    return make


def lane_for(dtype: torch.dtype, *, channels: int = 16, text: int = 16, **parts: Any) -> Lane:
    latents = torch.zeros(1, channels, *LATENT)
    return Lane(latents=latents, text=torch.zeros(1, text, 4096, dtype=dtype), **parts)


def peak_of(model, lanes):
    """Return the most bytes alive during a forward pass, in addition to weights and inputs."""
    lane = lanes[0]
    inputs = (lane.latents, lane.text, lane.image, lane.negative_text)
    held = [*model.parameters(), *model.buffers(), *(each for each in inputs if each is not None)]
    with torch.no_grad(), Alive(held) as alive:
        forward_lanes(model, lanes, torch.tensor([900.0]), lambda block: nullcontext())
    return alive.peak


def estimated(dtype, lanes=1, *, tokens=TOKENS, chunk=None, shorter=None, **how):
    """Return the estimate for a pass in which so many texts, or all, have few tokens."""
    shape = ExpertShape(**{"width": 512, "ffn_width": 1382, **how.pop("shape", {})})
    given = {"value_bytes": dtype.itemsize, "chunk_tokens": chunk, **how}
    shorter = 2 * lanes + 2 if shorter is None else shorter
    texts = shorter * TEXT * shape.width * dtype.itemsize
    return shape.working_bytes([tokens] * lanes, **given) - texts


def patches(lanes: int = 1, values: int = 64, tokens: int = TOKENS) -> int:
    """Return the bytes of the velocity's patches, which the estimate does not have."""
    return tokens * lanes * values * 4


@pytest.mark.parametrize(
    ("dtype", "lanes", "ffn_dim"), [(BF16, 1, 512), (FP32, 3, 1382), (BF16, 3, 4096)], ids=str
)
def test_the_estimate_is_what_a_forward_pass_holds(dtype, lanes, ffn_dim, make_model):
    peak = peak_of(make_model(dtype, ffn_dim=ffn_dim), [lane_for(dtype, text=TEXT)] * lanes)
    # Here is no other expert, which would have embedded the texts as well.
    estimate = estimated(dtype, lanes, shorter=lanes, shape={"ffn_width": ffn_dim})
    assert 0.9 * estimate <= peak <= 1.02 * estimate


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(
    ("heads", "ffn_dim", "lanes", "dtype", "chunk"),
    [
        (1, 345, 1, BF16, 1399),
        (4, 1382, 2, FP32, 200),
        (4, 4096, 2, BF16, 700),
        (4, 1382, 2, BF16, TOKENS),
    ],
)
def test_the_estimate_of_chunks(heads, ffn_dim, lanes, dtype, chunk, make_model):
    model = make_model(dtype, chunk=chunk, heads=heads, ffn_dim=ffn_dim)
    peak = peak_of(model, [lane_for(dtype)] * lanes)
    shape = {"width": 128 * heads, "ffn_width": ffn_dim}
    estimate = estimated(dtype, lanes, chunk=chunk, shape=shape)
    assert 0.9 * estimate <= peak <= 1.02 * estimate + patches(lanes)


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(("dtype", "chunk"), [(BF16, None), (FP32, 200), (BF16, 700)], ids=str)
def test_the_estimate_of_attention_to_a_second_text(dtype, chunk, make_model):
    model = make_model(dtype, chunk=chunk)
    negative = torch.zeros(1, TEXT, 4096, dtype=dtype)
    with changed(settings_of(model), nag=Nag()):
        peak = peak_of(model, [lane_for(dtype, text=TEXT, negative_text=negative)])
    estimate = estimated(dtype, chunk=chunk, shorter=0)
    assert peak <= 1.02 * estimate, f"{peak / estimate:.3f}"


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(
    ("lanes", "dtype", "chunk"), [(1, BF16, None), (2, FP32, None), (2, BF16, 700)], ids=str
)
def test_the_estimate_of_tokens_beside_the_video(lanes, dtype, chunk, make_model):
    latents = torch.zeros(1, 16, *LATENT)
    parts = [TokenPart(latents=latents, positions=Positions(source=each)) for each in (1, 2)]
    lane = replace(lane_for(dtype), latents=latents, behind=tuple(parts))
    peak = peak_of(make_model(dtype, chunk=chunk), [lane] * lanes)
    estimate = estimated(dtype, lanes, tokens=3 * TOKENS, chunk=chunk)
    assert 0.9 * estimate <= peak <= 1.02 * estimate + patches(lanes, tokens=3 * TOKENS)


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(("dtype", "chunk"), [(BF16, None), (FP32, 200)])
def test_the_estimate_of_attention_in_int8(dtype, chunk, make_model, monkeypatch):
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        codes = [torch.empty(each.shape, dtype=torch.int8) for each in (query, key, value)]
        result = torch.empty(query.shape, dtype=query.dtype)
        del codes  # they live until the result exists
        return result

    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(attention))
    model = make_model(dtype, chunk=chunk)
    settings_of(model).set(Kernels(attention="int8"), EXACT, chunk)
    peak = peak_of(model, [lane_for(dtype)])
    estimate = estimated(dtype, chunk=chunk, kernels=KernelNeeds(attention_bytes=3))
    assert 0.9 * estimate <= peak <= 1.02 * estimate, f"{peak / estimate:.3f}"
    assert (peak > 1.05 * estimated(dtype, chunk=chunk)) == (chunk is not None)


@pytest.mark.parametrize(
    ("dtype", "chunk"), [pytest.param(BF16, None, marks=pytest.mark.slow), (FP32, 350)], ids=str
)
def test_the_estimate_of_timesteps_per_frame(dtype, chunk, make_tiny_expert):
    """One modulation row per token, as in diffusers' pipelines, would take more than all this."""
    original = make_tiny_expert(heads=4, layers=1, ffn_dim=1382, in_channels=48)
    model = computed_in(original, dtype, chunk)
    lane = lane_for(dtype, channels=48, timestep_scales=(0.0, *(1.0,) * 4))
    peak = peak_of(model, [lane])
    estimate = estimated(dtype, chunk=chunk, shorter=0)
    assert peak <= 1.02 * estimate + patches(values=3 * 64), f"{peak / estimate:.3f}"
    if chunk is None:
        return
    times = torch.tensor([0.0, *[900.0] * 4]).repeat_interleave(TOKENS // 5)[None]
    held = [*model.parameters(), *model.buffers(), lane.latents, lane.text]
    with torch.no_grad(), Alive(held) as by_token:
        original(lane.latents.to(dtype), times, lane.text, return_dict=False)
    assert by_token.peak > peak + TOKENS * 6 * 512 * 4, f"{by_token.peak / peak:.3f}"


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(("lanes", "chunk"), [(1, 200), (2, None)])
def test_the_estimate_of_an_image_branch(lanes, chunk, make_model):
    dtype = BF16
    model = make_model(dtype, chunk=chunk, layers=1, ffn_dim=512, in_channels=36, image_dim=1280)
    image = torch.zeros(1, IMAGE_TOKENS, 1280, dtype=dtype)
    peak = peak_of(model, [lane_for(dtype, channels=36, text=TEXT, image=image)] * lanes)
    shape = {"ffn_width": 512, "image_width": 1280}
    estimate = estimated(dtype, lanes, chunk=chunk, shorter=0, shape=shape)
    assert 0.85 * estimate <= peak <= 1.02 * estimate, f"{peak / estimate:.3f}"


INT8 = EightBit(group=256)
CODES_OF_FP8 = EightBit(dtype=FP8)


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.parametrize(
    ("packing", "dtype", "at_once", "ffn_dim", "chunk"),
    [
        (INT8, BF16, 2**26, 512, 200),
        (CODES_OF_FP8, BF16, 2**18, 4096, None),
        (INT8, FP32, 2**18, 4096, None),
        (CODES_OF_FP8, FP32, 2**26, 512, 700),
    ],
)
def test_the_estimate_of_scratch(packing, dtype, chunk, at_once, ffn_dim, make_model, monkeypatch):
    monkeypatch.setattr(expert, "INT8_VALUES", at_once)
    model = make_model(dtype, chunk=chunk, layers=1, ffn_dim=ffn_dim)
    block = model.blocks[0]
    linears = [name for name, each in block.named_modules() if isinstance(each, torch.nn.Linear)]
    for layer in replace_linears(block, dict.fromkeys(linears, packing)):
        codes = torch.zeros(layer.weight.shape, dtype=packing.dtype)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.zeros(len(layer.weight), 1)
        if isinstance(layer, Int8Linear):
            layer.rotation = [torch.zeros(16, 16)] * 2
    peak = peak_of(model, [lane_for(dtype)])
    kernels = KernelNeeds(linear_format="int8")
    estimate = estimated(dtype, chunk=chunk, kernels=kernels, shape={"ffn_width": ffn_dim})
    assert peak <= 1.01 * estimate + patches()
    assert peak >= (0.9 if packing.group else 0.5) * estimate  # fp8 has no sums in int32


def test_short_videos_need_memory_for_int8_and_long_ones_none():
    """With 81 frames, norms take more than a linear layer with scratch memory."""
    for size, gigabytes in (((832, 480, 17), 0.5), ((832, 480, 81), 0), ((1280, 720, 81), 0)):
        tokens = VideoShape(**dict(zip(("width", "height", "frames"), size, strict=True))).tokens
        usual, int8 = (
            T2V_A14B.working_bytes([tokens], kernels=KernelNeeds(linear_format=each))
            for each in ("", "int8")
        )
        assert (int8 - usual) / 1e9 == pytest.approx(gigabytes, abs=0.1), size


def test_the_planner_gets_the_image_branch(open_one):
    with_images = open_one(in_channels=36, image_dim=1280)
    shape = (1, 16, *LATENT)
    tiny = ExpertShape(width=256, ffn_width=512, blocks=4, in_channels=36, image_width=1280)
    lanes = {0: (Stage("high"), lane_names(1, (Side.POSITIVE, Side.NEGATIVE)))}
    planned = run_shape(with_images, shape, CPU, lanes=lanes, sides={"high": (0, 0)})
    assert planned.expert == tiny
    assert planned.blocks.computed_bytes == 2 * tiny.streamed_bytes()  # fp32
    working = working_bytes(with_images, shape, sides=(0, 0))
    assert working == tiny.working_bytes([TOKENS] * 2, value_bytes=4)


def test_working_bytes_of_a_pair(open_pair):
    pair = open_pair()
    shape = (2, 16, *LATENT)
    tiny = ExpertShape(width=256, ffn_width=512)

    def of_lanes(count: int, **how: Any) -> int:
        return tiny.working_bytes([TOKENS] * count, **{"value_bytes": 4, **how})

    whole = working_bytes(pair, shape, sides=(0, 0))
    chunked = working_bytes(pair, shape, sides=(0, 0), chunk_tokens=100)
    assert working_bytes(pair, shape, sides=(0,)) == of_lanes(2)
    assert whole == of_lanes(4)
    assert working_bytes(open_pair(dtype=BF16), shape, sides=(0, 0)) == of_lanes(4, value_bytes=2)
    assert chunked == of_lanes(4, chunk_tokens=100) < whole
    pair.kernels = Kernels(attention="int8")
    assert working_bytes(pair, shape, sides=(0, 0), chunk_tokens=100) > chunked
