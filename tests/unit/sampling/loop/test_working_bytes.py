"""Estimated working memory compared with live tensors during a forward pass.

Most forward passes run on fake tensors: operations make true-size storages and compute nothing.
Latents can be so large that small terms ignored by the estimate are negligible.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wanstream.block_kernels import EXACT, BlockMath, Int8Linear, Kernels, replace_linears
from wanstream.block_kernels.block_math import TorchMath
from wanstream.offload.formats import FP8, EightBit
from wanstream.sampling import lane_names, run_shape, working_bytes
from wanstream.sampling.cache import Stage
from wanstream.sampling.steps import Side
from wanstream.shapes import T2V_A14B, ExpertShape, KernelNeeds, VideoShape, expert
from wanstream.shapes.expert import IMAGE_TOKENS
from wanstream.tests.support.alive_tensors import Alive
from wanstream.tests.support.int8_attention import kitchen
from wanstream.tests.support.wan_blocks import with_our_blocks
from wanstream.wan import Lane, Nag, Positions, TokenPart, changed, forward_lanes, settings_of

LATENT = (5, 40, 56)
TOKENS = 5 * 20 * 28
TEXT = 512


CHUNK_CASES = [
    (shape, chunk, 1 + index // 2 % 2, (torch.bfloat16, torch.float32)[index // 4 % 2])
    for index, (shape, chunk) in enumerate(
        itertools.product([(1, 345), (4, 1382), (4, 4096)], [200, 700, 1399, TOKENS, 10**6])
    )
    if index % 2 == 0
]
"""Every shape and every chunk, with one and two lanes and both dtypes."""


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def computed_in(model: torch.nn.Module, dtype: torch.dtype, **settings: Any) -> Any:
    """Return a model with these tensors and our blocks.

    Copied fake tensors would belong to another mode.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return with_our_blocks(model, **settings)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    ("ffn_dim", "math"), [(512, EXACT), (1382, TorchMath()), (4096, TorchMath())]
)
def test_the_estimate_is_what_a_forward_pass_holds_at_once(
    dtype: torch.dtype, lanes: int, ffn_dim: int, math: BlockMath, make_tiny_expert: Any
) -> None:
    model = computed_in(make_tiny_expert(heads=4, layers=2, ffn_dim=ffn_dim), dtype)
    inputs = [
        Lane(latents=torch.zeros(1, 16, *LATENT), text=torch.zeros(1, TEXT, 4096, dtype=dtype))
    ] * lanes
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), inputs[0].text]) as alive:
        forward_lanes(model, inputs, torch.tensor([900.0]), lambda block: nullcontext())
    estimate = ExpertShape(width=512, ffn_width=ffn_dim).working_bytes(
        [TOKENS] * lanes, value_bytes=dtype.itemsize
    )
    estimate -= lanes * TEXT * 512 * dtype.itemsize  # the texts as the other expert embeds them
    assert 0.9 * estimate <= alive.peak <= 1.02 * estimate


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [(torch.bfloat16, None), (torch.float32, 200), (torch.bfloat16, 700)],
    ids=str,
)
def test_attention_to_a_second_text_takes_no_more_than_the_estimate(
    dtype: torch.dtype, chunk: int | None, make_tiny_expert: Any
) -> None:
    model = computed_in(
        make_tiny_expert(heads=4, layers=2, ffn_dim=1382), dtype, chunk_tokens=chunk
    )
    text, negative = (torch.zeros(1, TEXT, 4096, dtype=dtype) for _ in range(2))
    lanes = [Lane(latents=torch.zeros(1, 16, *LATENT), text=text, negative_text=negative)]
    with torch.no_grad(), changed(settings_of(model), nag=Nag()):
        with Alive([*model.parameters(), *model.buffers(), text, negative]) as alive:
            forward_lanes(model, lanes, torch.tensor([900.0]), lambda block: nullcontext())
    shape = ExpertShape(width=512, ffn_width=1382)
    estimate = shape.working_bytes([TOKENS], value_bytes=dtype.itemsize, chunk_tokens=chunk)
    assert alive.peak <= 1.02 * estimate, f"{alive.peak / estimate:.3f}"


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("lanes", "dtype", "chunk"),
    [
        (1, torch.bfloat16, None),
        (2, torch.float32, None),
        (2, torch.bfloat16, 700),
        (1, torch.float32, 700),
    ],
    ids=str,
)
def test_the_estimate_counts_the_tokens_beside_the_video(
    lanes: int, dtype: torch.dtype, chunk: int | None, make_tiny_expert: Any
) -> None:
    model = computed_in(
        make_tiny_expert(heads=4, layers=2, ffn_dim=1382), dtype, chunk_tokens=chunk
    )
    latents, text = torch.zeros(1, 16, *LATENT), torch.zeros(1, 16, 4096, dtype=dtype)
    behind = tuple(
        TokenPart(latents=latents, positions=Positions(source=source)) for source in (1, 2)
    )
    inputs = [Lane(latents=latents, text=text, behind=behind)] * lanes
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), latents, text]) as alive:
        forward_lanes(model, inputs, torch.tensor([900.0]), lambda block: nullcontext())
    shape, tokens = ExpertShape(width=512, ffn_width=1382), 3 * TOKENS
    estimate = shape.working_bytes([tokens] * lanes, value_bytes=dtype.itemsize, chunk_tokens=chunk)
    texts, patches = (2 * lanes + 2) * TEXT * 512 * dtype.itemsize, tokens * lanes * 64 * 4
    assert 0.9 * (estimate - texts) <= alive.peak <= 1.02 * (estimate - texts) + patches


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("dtype", "chunk"), [(torch.bfloat16, None), (torch.float32, 200)], ids=str
)
def test_attention_in_int8_takes_no_more_than_the_estimate(
    dtype: torch.dtype, chunk: int | None, make_tiny_expert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        codes = [torch.empty(each.shape, dtype=torch.int8) for each in (query, key, value)]
        result = torch.empty(query.shape, dtype=query.dtype)
        del codes  # they live until the result exists
        return result

    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(attention))
    model = computed_in(
        make_tiny_expert(heads=4, layers=2, ffn_dim=1382), dtype, chunk_tokens=chunk
    )
    lanes = [Lane(latents=torch.zeros(1, 16, *LATENT), text=torch.zeros(1, 16, 4096, dtype=dtype))]
    settings_of(model).set(Kernels(attention="int8"), EXACT, chunk)
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), lanes[0].text]) as alive:
        forward_lanes(model, lanes, torch.tensor([900.0]), lambda block: nullcontext())
    shape, texts = ExpertShape(width=512, ffn_width=1382), 4 * TEXT * 512 * dtype.itemsize
    given = {"value_bytes": dtype.itemsize, "chunk_tokens": chunk}
    estimate = (
        shape.working_bytes([TOKENS], **given, kernels=KernelNeeds(attention_bytes=3)) - texts
    )
    assert 0.9 * estimate <= alive.peak <= 1.02 * estimate, f"{alive.peak / estimate:.3f}"
    usual = shape.working_bytes([TOKENS], **given) - texts
    assert (alive.peak > 1.05 * usual) == (chunk is not None)


@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [pytest.param(torch.bfloat16, None, marks=pytest.mark.slow), (torch.float32, 64)],
    ids=str,
)
def test_frames_with_timesteps_of_their_own_take_no_more_than_the_estimate(
    dtype: torch.dtype, chunk: int | None, make_tiny_expert: Any
) -> None:
    """One modulation row per token would take more memory than all this.

    diffusers' pipelines have one per token.
    """
    original = make_tiny_expert(heads=4, layers=2, ffn_dim=1382, in_channels=48)
    model = computed_in(original, dtype, chunk_tokens=chunk)
    latents, text = torch.zeros(1, 48, *LATENT), torch.zeros(1, 16, 4096, dtype=dtype)
    lanes = [Lane(latents=latents, text=text, timestep_scales=(0.0, *(1.0,) * 4))]
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), latents, text]) as alive:
        forward_lanes(model, lanes, torch.tensor([900.0]), lambda block: nullcontext())
    shape = ExpertShape(width=512, ffn_width=1382)
    estimate = shape.working_bytes([TOKENS], value_bytes=dtype.itemsize, chunk_tokens=chunk)
    patches = TOKENS * 3 * 64 * 4
    assert alive.peak <= 1.02 * estimate + patches, f"{alive.peak / estimate:.3f}"
    if chunk is None:
        return
    times = torch.tensor([0.0, *[900.0] * 4]).repeat_interleave(TOKENS // 5)[None]
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), latents, text]) as by_token:
        original(latents.to(dtype), times, text, return_dict=False)
    assert by_token.peak > alive.peak + TOKENS * 6 * 512 * 4, f"{by_token.peak / alive.peak:.3f}"


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("lanes", "chunk"), [(1, 200), (2, None)])
def test_the_estimate_of_an_image_branch_is_what_a_forward_pass_holds_at_once(
    lanes: int, chunk: int | None, make_tiny_expert: Any
) -> None:
    dtype = torch.bfloat16
    made = make_tiny_expert(heads=4, layers=1, ffn_dim=512, in_channels=36, image_dim=1280)
    model = computed_in(made, dtype, chunk_tokens=chunk)
    latents, text = torch.zeros(1, 36, *LATENT), torch.zeros(1, TEXT, 4096, dtype=dtype)
    image = torch.zeros(1, IMAGE_TOKENS, 1280, dtype=dtype)
    inputs = [Lane(latents=latents, text=text, image=image)] * lanes
    with (
        torch.no_grad(),
        Alive([*model.parameters(), *model.buffers(), latents, text, image]) as alive,
    ):
        forward_lanes(model, inputs, torch.tensor([900.0]), lambda block: nullcontext())
    shape = ExpertShape(width=512, ffn_width=512, image_width=1280)
    estimate = shape.working_bytes([TOKENS] * lanes, value_bytes=dtype.itemsize, chunk_tokens=chunk)
    assert 0.85 * estimate <= alive.peak <= 1.02 * estimate, f"{alive.peak / estimate:.3f}"


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("shape", "chunk", "lanes", "dtype"), CHUNK_CASES, ids=str)
def test_the_estimate_of_chunks_is_what_a_forward_pass_holds_at_once(
    shape: tuple[int, int], chunk: int, lanes: int, dtype: torch.dtype, make_tiny_expert: Any
) -> None:
    heads, ffn_dim = shape
    model, width = (
        computed_in(
            make_tiny_expert(heads=heads, layers=2, ffn_dim=ffn_dim), dtype, chunk_tokens=chunk
        ),
        128 * heads,
    )
    inputs = [
        Lane(latents=torch.zeros(1, 16, *LATENT), text=torch.zeros(1, 16, 4096, dtype=dtype))
    ] * lanes
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), inputs[0].text]) as alive:
        forward_lanes(model, inputs, torch.tensor([900.0]), lambda block: nullcontext())
    expert = ExpertShape(width=width, ffn_width=ffn_dim)
    estimate = expert.working_bytes(
        [TOKENS] * lanes, value_bytes=dtype.itemsize, chunk_tokens=chunk
    )
    # The estimate includes 512-token texts for both experts, but not the velocity's patches.
    texts = (2 * lanes + 2) * TEXT * width * dtype.itemsize
    patches = TOKENS * lanes * 64 * 4
    assert 0.9 * (estimate - texts) <= alive.peak <= 1.02 * (estimate - texts) + patches


CODE_CASES = [
    (EightBit(group=256) if kind == "int8" else EightBit(dtype=FP8), dtype, chunk, at_once, ffn_dim)
    for dtype, other in ((torch.bfloat16, 0), (torch.float32, 1))
    for code, kind in enumerate(("int8", "fp8"))
    for index, chunk in enumerate((None, 200, 700))
    for at_once, ffn_dim in [((2**26, 2**18)[code ^ other], (512, 4096)[(code + index) % 2])]
]
"""Every pair of values for two parameters."""


@pytest.mark.slow  # measures memory in large steps
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("packing", "dtype", "chunk", "at_once", "ffn_dim"), CODE_CASES, ids=str)
def test_the_estimate_has_the_scratch_memory_of_codes(
    packing: EightBit,
    dtype: torch.dtype,
    chunk: int | None,
    at_once: int,
    ffn_dim: int,
    make_tiny_expert: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(expert, "INT8_VALUES", at_once)
    model = computed_in(
        make_tiny_expert(heads=4, layers=1, ffn_dim=ffn_dim), dtype, chunk_tokens=chunk
    )
    linears = [
        name
        for name, layer in model.blocks[0].named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    layers = replace_linears(model.blocks[0], dict.fromkeys(linears, packing))
    for layer in layers:
        layer.weight = torch.nn.Parameter(
            torch.zeros(layer.weight.shape, dtype=packing.dtype), requires_grad=False
        )
        layer.weight_scale = torch.zeros(len(layer.weight), 1)
        if isinstance(layer, Int8Linear):
            layer.rotation = [torch.zeros(16, 16)] * 2
    lanes = [Lane(latents=torch.zeros(1, 16, *LATENT), text=torch.zeros(1, 16, 4096, dtype=dtype))]
    with torch.no_grad(), Alive([*model.parameters(), *model.buffers(), lanes[0].text]) as alive:
        forward_lanes(model, lanes, torch.tensor([900.0]), lambda block: nullcontext())
    shape = ExpertShape(width=512, ffn_width=ffn_dim)
    options = {"value_bytes": dtype.itemsize, "chunk_tokens": chunk}
    estimate = shape.working_bytes([TOKENS], **options, kernels=KernelNeeds(linear_format="int8"))
    texts = 4 * TEXT * 512 * dtype.itemsize
    assert alive.peak <= 1.01 * (estimate - texts) + TOKENS * 64 * 4
    assert alive.peak >= (0.9 if packing.group else 0.5) * (
        estimate - texts
    )  # fp8 has no sums in int32


def test_short_videos_need_memory_for_int8_and_long_ones_none() -> None:
    """With 81 frames, norms take more than a linear layer with scratch memory."""
    for size, gigabytes in (((832, 480, 17), 0.5), ((832, 480, 81), 0), ((1280, 720, 81), 0)):
        width, height, frames = size
        tokens = VideoShape(width=width, height=height, frames=frames).tokens
        usual, int8 = (
            T2V_A14B.working_bytes([tokens], kernels=KernelNeeds(linear_format=each))
            for each in ("", "int8")
        )
        assert (int8 - usual) / 1e9 == pytest.approx(gigabytes, abs=0.1), size


def test_the_planner_hears_of_an_image_branch(open_one: Any) -> None:
    with_images, shape = open_one(in_channels=36, image_dim=1280), (1, 16, 5, 40, 56)
    tiny = ExpertShape(width=256, ffn_width=512, blocks=4, in_channels=36, image_width=1280)
    lanes = {0: (Stage("high"), lane_names(1, (Side.POSITIVE, Side.NEGATIVE)))}
    run = run_shape(with_images, shape, torch.device("cpu"), lanes=lanes, sides={"high": (0, 0)})
    assert run.expert == tiny
    assert run.blocks.computed_bytes == 2 * tiny.streamed_bytes()  # fp32
    assert working_bytes(with_images, shape, sides=(0, 0)) == tiny.working_bytes(
        [TOKENS] * 2, value_bytes=4
    )


def test_a_pair_says_it_for_latents(open_pair: Any) -> None:
    pair, shape = open_pair(), (2, 16, 5, 40, 56)
    tiny = ExpertShape(width=256, ffn_width=512)
    assert working_bytes(pair, shape, sides=(0,)) == tiny.working_bytes([TOKENS] * 2, value_bytes=4)
    assert working_bytes(pair, shape, sides=(0, 0)) == tiny.working_bytes(
        [TOKENS] * 4, value_bytes=4
    )
    assert working_bytes(
        open_pair(dtype=torch.bfloat16), shape, sides=(0, 0)
    ) == tiny.working_bytes([TOKENS] * 4)
    chunked = working_bytes(pair, shape, sides=(0, 0), chunk_tokens=100)
    assert chunked == tiny.working_bytes([TOKENS] * 4, value_bytes=4, chunk_tokens=100)
    assert chunked < working_bytes(pair, shape, sides=(0, 0))
    pair.kernels = Kernels(attention="int8")
    assert working_bytes(pair, shape, sides=(0, 0), chunk_tokens=100) > chunked
