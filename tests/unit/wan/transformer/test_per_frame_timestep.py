"""Wan2.2 TI2V-5B: a timestep for each frame, in all block kernels.

`experts/test_open.py` has the file formats.
"""

import pytest
import torch

from wanstream.block_kernels import EXACT
from wanstream.block_kernels.block_math import TorchMath
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.runs import normal
from wanstream.tests.support.wan.blocks import computed, diffusers_block
from wanstream.tests.support.wan.opened_experts import (
    FIRST_TIME,
    SWAP,
    plain_velocity,
    streamed,
    whole_model,
)
from wanstream.wan import Lane
from wanstream.wan.experts.open import open_single_model
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler
from wanstream.wan.transformer.per_frame_timestep import (
    FrameModulation,
    Modulation,
    frame_timesteps,
    row_spans,
)

FP32 = torch.float32
FREEDOM = (0.0, 1.0, 0.25)


def _lane(timestep_scales=FREEDOM):
    latents = normal(1, 48, 3, 4, 6, seed=1)
    return Lane(latents=latents, text=normal(1, 7, 4096, seed=2), timestep_scales=timestep_scales)


@pytest.mark.parametrize(
    ("scales", "dtype"), [(None, FP32), (FREEDOM, torch.bfloat16), ((0.5, 0.5, 0.5), FP32)], ids=str
)
def test_lane_equals_the_model_with_a_timestep_for_every_token(scales, dtype, tiny_expert_folder):
    folder = tiny_expert_folder(in_channels=48, layers=3)
    lane = _lane(scales)
    times = torch.tensor(scales or (1.0,) * 3).repeat_interleave(2 * 3)[None] * FIRST_TIME
    expected = plain_velocity(whole_model(folder, dtype), lane, times).float()
    with open_single_model(folder, compute_dtype=dtype) as pair:
        found, company = streamed(pair, SWAP, lane, _lane((1.0, 0.0, 1.0)))
        # A row is rounded differently in a matrix product with all tokens than alone.
        limit = 1e-6 if dtype == FP32 else 1e-2
        assert distance(found.float(), expected) <= limit
        assert torch.equal(found, streamed(pair, SWAP, lane)[0]), "company changes nothing"
        assert not torch.equal(found, company)


@pytest.fixture
def block():
    torch._dynamo.reset()
    with torch.no_grad():
        yield diffusers_block()
    torch._dynamo.reset()


def _inputs(tokens, rows):
    angles = normal(1, tokens, 1, 128, seed=tokens)
    bounds = [row * (tokens // rows) for row in range(rows)] + [tokens]
    spans = tuple(zip(bounds, bounds[1:], range(rows), strict=False))
    modulation = FrameModulation(rows=normal(rows, 6, 128, seed=rows), spans=spans)
    shapes = (normal(1, tokens, 128, seed=1), normal(1, 3, 128, seed=2))
    return (*shapes, modulation, (angles.cos(), angles.sin()))


@pytest.mark.parametrize("math", [EXACT, TorchMath()], ids=lambda math: math.name)
def test_graphs_are_one_for_any_number_of_timesteps(math, block):
    """Expect one more graph for lanes whose frames share a timestep.

    Compare with diffusers' block, given a row for every token.
    """
    compiler = get_compiler("eager")
    counted = []
    settings = BlockSettings(compiler=compiler, math=math)
    originals = (block, diffusers_block(seed=1))
    blocks = [WanBlock(each, settings) for each in originals]
    for rows in (2, 2, 3, 4, 1):
        hidden, text, modulation, tables = _inputs(40, rows)
        by_token = modulation.rows[modulation.row_of_token][None]
        given = modulation if rows > 1 else modulation.rows
        before = compiler.graphs
        for each, original in zip(blocks, originals, strict=True):
            found = computed(each, hidden, text, given, tables)
            expected = original(hidden, text, by_token, tables)
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), rows
        counted.append(compiler.graphs - before)
    assert counted == [1, 0, 0, 0, 1]


def test_spans_of_all_tokens_and_of_a_part_of_them():
    frames = [(0, 4), (1, 4), (1, 4)]
    whole, second, last = (
        row_spans(frames, lambda tokens, share=share, rank=rank: tokens.chunk(share, dim=1)[rank])
        for share, rank in ((1, 0), (4, 1), (4, 3))
    )
    assert whole == ((0, 4, 0), (4, 12, 1))
    assert second == ((0, 1, 0), (1, 3, 1)), "a part begins within a frame"
    assert last == ((0, 3, 1),)
    spans = row_spans([(0, 4), (1, 4), (0, 4)], lambda tokens: tokens)
    assert Modulation((), spans).part(slice(2, 9)).spans == ((0, 2, 0), (2, 6, 1), (6, 7, 0))
    modulation = FrameModulation(rows=torch.zeros(2, 6, 1), spans=second)
    assert modulation.row_of_token.tolist() == [0, 1, 1]


def test_timesteps_are_float32_products():
    assert frame_timesteps((0.0, 1.0), 937.5) == (0.0, 937.5)
    assert frame_timesteps((0.1,), 0.3) == (float(torch.tensor(0.1) * 0.3),)
