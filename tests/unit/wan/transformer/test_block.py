"""Our blocks against diffusers' block: function sets, chunks, rows, two texts, an image branch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from wanstream.block_kernels import MIN_TOKENS, choose_math, chunk_slices
from wanstream.shapes import T2V_A14B, TEXT_TOKENS, VideoShape
from wanstream.tests.support.wan.blocks import Operations, block_inputs, computed, diffusers_block
from wanstream.wan import Nag, changed
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.nag import guide
from wanstream.wan.transformer.per_frame_timestep import FrameModulation

CPU = torch.device("cpu")
FP32 = torch.float32
BF16 = torch.bfloat16
ERROR = {FP32: 1e-5, BF16: 1e-2}
"""Relative error in a block's change to the input, against the exact set. comfy-kitchen rounds
the modulation to bf16 too."""
NAG = Nag(scale=5.0, tau=1.5, alpha=0.5)
TOKENS = 271
IMAGE = 17


def math_of(name, dtype=FP32):
    if name == "comfy-kitchen":
        pytest.importorskip("comfy_kitchen")
    return choose_math(name, CPU, dtype, 256)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _equal_rows(equal_bf16_rows):
    """Compare to the bit on every processor."""


def by_hand(block, given):
    """Return the tokens after diffusers' block, with NAG if there are two texts."""
    hidden, text, temb, tables = given
    if isinstance(temb, FrameModulation):
        temb = temb.rows[temb.row_of_token][None]
    if isinstance(text, torch.Tensor):
        return block(hidden, text, temb, tables)
    attended: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        attended.append(inputs[0])
        return (attended[0] if len(attended) == 1 else guide(attended[0], attended[1], NAG),)

    # The second pass combines both results of attention before the output projection.
    hook = block.attn2.to_out[0].register_forward_pre_hook(keep)
    try:
        block(hidden, text[0], temb, tables)
        result: torch.Tensor = block(hidden, text[1], temb, tables)
    finally:
        hook.remove()
    return result


def case_of(form, dtype):
    """Return diffusers' block, and inputs in this form."""
    image = {"added_kv_proj_dim": 256} if form == "image" else {}
    words = IMAGE + TEXT_TOKENS if form == "image" else 7
    block = diffusers_block(2, 345, dtype, **image)
    hidden, text, temb, tables = block_inputs(TOKENS, 2, dtype, words=words)
    if form == "rows":
        spans = ((0, 200, 1), (200, 231, 0), (231, TOKENS, 1))
        temb = FrameModulation(rows=torch.cat([temb, 2 * temb]), spans=spans)
    if form == "two texts":
        return block, (hidden, (text, text[:, :5].neg()), temb, tables)
    return block, (hidden, text, temb, tables)


@pytest.mark.parametrize(
    ("name", "form", "dtype", "chunk"),
    [
        ("exact", "one row", FP32, 64),
        ("exact", "one row", BF16, None),
        ("exact", "rows", BF16, 64),
        ("exact", "two texts", FP32, 256),
        ("exact", "image", BF16, 64),
        ("torch", "one row", BF16, 64),
        ("torch", "rows", FP32, 256),
        ("torch", "two texts", BF16, 64),
        ("torch", "image", FP32, 64),
        ("comfy-kitchen", "one row", FP32, 256),
        ("comfy-kitchen", "rows", BF16, 64),
        ("comfy-kitchen", "two texts", FP32, 64),
        ("comfy-kitchen", "image", BF16, 64),
    ],
    ids=str,
)
def test_values_are_those_of_diffusers(name, form, dtype, chunk):
    """The exact set is bit-equal to diffusers, and chunks change no bit in any set."""
    block, given = case_of(form, dtype)
    expected = by_hand(block, given)
    before = given[0].clone()
    ours = WanBlock(block, BlockSettings(math=math_of(name, dtype), nag=NAG))
    found = computed(ours, *given, chunk_tokens=chunk)
    assert found.dtype == dtype
    assert torch.equal(given[0], before)
    assert found.untyped_storage().data_ptr() != given[0].untyped_storage().data_ptr()
    if name == "exact" and form in ("one row", "image"):  # NAG attends in parts: other last bits
        assert torch.equal(found, expected)
    added = (expected.float() - before.float()).norm()
    assert (found.float() - expected.float()).norm() <= ERROR[dtype] * added
    if chunk is not None:
        assert torch.equal(found, computed(ours, *given, chunk_tokens=None))


@pytest.mark.parametrize("chunk", [1, 7, 254])
def test_chunks_of_any_size(chunk):
    """Compare with a tolerance, because last bits in fp32 differ.

    MKL uses another kernel for some row counts.
    """
    block, given = case_of("rows", FP32)
    ours = WanBlock(block, BlockSettings(math=math_of("torch"), chunk_tokens=chunk))
    assert torch.allclose(computed(ours, *given), by_hand(block, given), rtol=1e-5, atol=1e-5)


def test_transposed_hidden_state_is_taken_as_it_is():
    """The first block gets its tokens from a convolution, as a transposed view."""
    block, (hidden, *others) = case_of("one row", FP32)
    transposed = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    ours = WanBlock(block, BlockSettings())
    assert torch.equal(computed(ours, transposed, *others, chunk_tokens=64), block(hidden, *others))


def test_settings_are_restored_after_an_error():
    settings = BlockSettings(chunk_tokens=4)
    before = dict(vars(settings))
    with pytest.raises(KeyError), changed(settings, nag=NAG, chunk_tokens=None):
        assert (settings.nag, settings.chunk_tokens) == (NAG, None)
        raise KeyError
    assert vars(settings) == before


@pytest.mark.parametrize(
    ("tokens", "chunk", "sizes"),
    [
        (300, 100, [100, 100, 100]),
        (300, 128, [128, 128, 44]),
        (300, 1000, [300]),
        (300, 300, [300]),
        (300 - MIN_TOKENS, 100, [100, 100, 84]),
        (300 + MIN_TOKENS, 100, [100, 100, 100, MIN_TOKENS]),
        (299 + MIN_TOKENS, 100, [100, 100, 99 + MIN_TOKENS]),  # 15 are too few for a chunk
        (3, 1, [3]),
    ],
)
def test_products_are_of_a_chunk_and_the_attention_of_all(tokens, chunk, sizes):
    ours = WanBlock(diffusers_block(), BlockSettings(chunk_tokens=chunk))
    with Operations() as operations:
        computed(ours, *block_inputs(tokens))
    # q, k, v and out, then q and out, then two in the feed-forward. Keys and values for the 7
    # text tokens.
    rows = [args[1].shape[0] for args in operations.arguments("aten.addmm")]
    assert Counter(rows) == Counter(sizes * 8) + Counter([7, 7])
    attended = [args[0].shape[2] for args in operations.arguments("scaled_dot_product")]
    assert attended == [tokens, tokens]
    assert [at.stop - at.start for at in chunk_slices(tokens, chunk)] == sizes


@pytest.mark.parametrize("chunk", [None, 512])
def test_no_token_gets_a_copy_of_its_rows(chunk):
    """In contrast to diffusers' block, no tensor with six rows per token is created."""
    hidden, text, temb, tables = block_inputs(4096)
    rows = FrameModulation(rows=torch.cat([temb, temb]), spans=((0, 2048, 0), (2048, 4096, 1)))
    ours = WanBlock(diffusers_block(), BlockSettings(chunk_tokens=chunk))
    with Operations() as operations:
        computed(ours, hidden, text, rows, tables)
    made = [each for _, _, each in operations.calls if isinstance(each, torch.Tensor)]
    assert max(each.untyped_storage().nbytes() for each in made) < 3 * hidden.nbytes


def test_attention_to_an_image_is_added_to_the_guided_one():
    block, (hidden, rows, temb, tables) = case_of("image", FP32)
    attn = block.attn2
    negative = rows[:, :5].neg()
    ours = WanBlock(block, BlockSettings(nag=NAG))
    query = attn.norm_q(attn.to_q(hidden))

    def attended(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    image = rows[:, :IMAGE]
    text = rows[:, IMAGE:]
    texts = (text, negative)
    each = [attended(attn.norm_k(attn.to_k(words)), attn.to_v(words)) for words in texts]
    image_part = attended(attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image))
    found = ours._attend_texts(query, (rows, negative))
    assert torch.allclose(found, guide(*each, NAG) + image_part, rtol=1e-5, atol=1e-5)
    assert computed(ours, hidden, (rows, negative), temb, tables).shape == hidden.shape


@pytest.mark.parametrize("chunk", [1024, 4096])
def test_values_and_peak_of_the_real_width(gpu, chunk):
    """Compare peak memory and results for one A14B block at 832x480x33."""
    gpu.need_kernels("a block of the real width takes minutes on a CPU")
    tokens = VideoShape(width=832, height=480, frames=33).tokens
    block = diffusers_block(40, 13824, BF16).to("cuda")
    hidden, text, modulation, tables = block_inputs(tokens, 40, BF16)
    inputs = [each.cuda() for each in (hidden, text, modulation)]
    inputs.append(tuple(table.cuda() for table in tables))
    expected = block(*inputs)
    math = choose_math("auto", hidden.cuda().device, BF16, hidden.shape[2])
    ours = WanBlock(block, BlockSettings(math=math, chunk_tokens=chunk))
    inputs[3] = math.rotation(*inputs[3])
    ours(*inputs)  # libraries take their workspaces, kernels are compiled
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = ours(*inputs)
    peak = torch.cuda.max_memory_allocated() - before + inputs[0].nbytes
    change = (expected - inputs[0]).float().norm()
    assert (found.float() - expected.float()).norm() <= ERROR[BF16] * change
    predicted = T2V_A14B.working_bytes([tokens], chunk_tokens=chunk)
    assert 0.85 * predicted <= peak <= 1.05 * predicted
