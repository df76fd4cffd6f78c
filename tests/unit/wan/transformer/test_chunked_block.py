"""Chunked block forwards: results equal to the block's, hooks, peak memory, complete detaching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch.utils._python_dispatch import TorchDispatchMode

from wanstream.schema import T2V_A14B, VideoShape
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan.transformer.chunked_block import MIN_TOKENS, ChunkedAttention, ChunkedBlocks

SUBMODULES = ("norm1", "attn1", "norm2", "attn2", "norm3", "ffn")


def block_of(heads: int, ffn_dim: int, dtype: torch.dtype, **more: Any) -> WanTransformerBlock:
    """Return a block in `dtype`, with the parameters in fp32 that `from_pretrained` keeps in fp32."""
    torch.manual_seed(heads)
    block = WanTransformerBlock(128 * heads, ffn_dim, heads, cross_attn_norm=True, **more)
    for name, parameter in block.named_parameters():
        if not set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return block.eval().requires_grad_(False)


def inputs_of(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return hidden state, text, modulation and rotary embedding in the shapes of a model."""
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.rand(1, tokens, 1, 64, generator=draw).repeat_interleave(2, dim=-1) * 6
    return (
        torch.randn(1, tokens, 128 * heads, generator=draw).to(dtype),
        torch.randn(1, 7, 128 * heads, generator=draw).to(dtype),
        torch.randn(1, 6, 128 * heads, generator=draw).to(dtype),
        (angles.cos(), angles.sin()),
    )  # type: ignore[return-value]


@pytest.fixture
def block() -> WanTransformerBlock:
    return block_of(2, 512, torch.float32)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _equal_rows(equal_bf16_rows: None) -> None:
    """Compare to the bit on every processor."""


BLOCKS = [
    (2, 512, torch.float32),
    (1, 384, torch.float32),
    (4, 1408, torch.float32),
    # Not in fp32: MKL shares products of these widths between threads by their rows, and last bits differ.
    (1, 345, torch.bfloat16),
    (4, 1382, torch.bfloat16),
]
CUTS = [(15, 256), (256, 256), (513, 256), (513, 512), (775, 256), (775, 768), (775, 10**6)]
BLOCK_CASES = [
    (*block, *cut) for number, block in enumerate(BLOCKS) for place, cut in enumerate(CUTS) if (number + place) % 2 == 0
]
"""Every second pair of a block and of tokens with a chunk, so that each number of tokens has blocks in both dtypes."""


class TestValues:
    @pytest.mark.parametrize(("heads", "ffn_dim", "dtype", "tokens", "chunk"), BLOCK_CASES, ids=str)
    def test_are_those_of_the_block_to_the_bit(
        self, dtype: torch.dtype, heads: int, ffn_dim: int, tokens: int, chunk: int
    ) -> None:
        block, inputs = block_of(heads, ffn_dim, dtype), inputs_of(tokens, heads, dtype)
        expected = block(*inputs)
        ChunkedBlocks([block], chunk)
        found = block(*inputs)
        assert found.dtype == dtype
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("chunk", [256, 512])
    def test_of_a_block_that_attends_to_images_too(self, dtype: torch.dtype, chunk: int) -> None:
        block, (hidden, _, *rest) = block_of(2, 512, dtype, added_kv_proj_dim=256), inputs_of(513, 2, dtype)
        rows = torch.randn(1, 17 + 512, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = block(hidden, rows, *rest)
        assert not torch.equal(block(hidden, rows.roll(17, dims=1), *rest), expected)
        ChunkedBlocks([block], chunk)
        assert torch.equal(block(hidden, rows, *rest), expected)

    @pytest.mark.parametrize("chunk", [1, 7, 100, 254])
    def test_are_those_of_the_block_in_chunks_of_any_size(self, block: WanTransformerBlock, chunk: int) -> None:
        """Compare with a tolerance: MKL uses another kernel for some numbers of rows, and last bits of fp32 differ."""
        inputs = inputs_of(271, 2, torch.float32)
        expected = block(*inputs)
        ChunkedBlocks([block], chunk)
        assert torch.allclose(block(*inputs), expected, rtol=1e-5, atol=1e-5)

    def test_the_input_stays_as_it_is_and_is_not_the_output(self, block: WanTransformerBlock) -> None:
        hidden, *others = inputs_of(300, 2, torch.float32)
        text, before = others[0].clone(), hidden.clone()
        ChunkedBlocks([block], 64)
        found = block(hidden, *others)
        assert torch.equal(hidden, before)
        assert torch.equal(others[0], text)
        assert found.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr()

    def test_a_hidden_state_that_is_a_transposed_view_is_taken_as_it_is(self, block: WanTransformerBlock) -> None:
        """The first block gets its tokens from a convolution, as a transposed view."""
        hidden, *others = inputs_of(300, 2, torch.float32)
        transposed = hidden.transpose(1, 2).contiguous().transpose(1, 2)
        expected = block(transposed, *others)
        ChunkedBlocks([block], 256)
        assert torch.equal(block(transposed, *others), expected)


class Operations(TorchDispatchMode):
    """Records the number of rows of each matrix product and of tokens of each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.attended: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.rows.append(args[1].shape[0])
        elif "scaled_dot_product" in str(func):
            self.attended.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


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
def test_products_are_of_a_chunk_and_the_attention_of_all(
    block: WanTransformerBlock, tokens: int, chunk: int, sizes: list[int]
) -> None:
    ChunkedBlocks([block], chunk)
    with Operations() as operations:
        block(*inputs_of(tokens, 2, torch.float32))
    # q, k, v and out; q and out; the two of the feed-forward. Keys and values of the 7 tokens of the text.
    assert Counter(operations.rows) == Counter(sizes * 8) + Counter([7, 7])
    assert operations.attended == [tokens, tokens]


class TestAttached:
    def test_modules_are_called_as_modules(self, block: WanTransformerBlock) -> None:
        fired: Counter[str] = Counter()
        for name in SUBMODULES:
            block.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.update([name]))
        ChunkedBlocks([block], 100)
        block(*inputs_of(300, 2, torch.float32))
        assert fired == {"attn1": 1, "attn2": 1, "norm1": 3, "norm2": 3, "norm3": 3, "ffn": 3}

    def test_detaching_leaves_nothing_behind(self, block: WanTransformerBlock) -> None:
        before = [dict(vars(module)) for module in block.modules()]
        blocks = ChunkedBlocks([block], 100)
        assert [dict(vars(module)) for module in block.modules()] != before
        blocks.detach()
        blocks.detach()
        assert [dict(vars(module)) for module in block.modules()] == before

    def test_what_diffusers_sets_on_processors_is_handed_over_both_ways(self, block: WanTransformerBlock) -> None:
        own = [block.attn1.processor, block.attn2.processor]
        own[0]._attention_backend, own[1]._parallel_config = "_native_math", "ranks"
        blocks = ChunkedBlocks([block], 100)
        chunked = [block.attn1.processor, block.attn2.processor]
        assert all(isinstance(processor, ChunkedAttention) for processor in chunked)
        assert [processor._attention_backend for processor in chunked] == ["_native_math", None]
        assert [processor._parallel_config for processor in chunked] == [None, "ranks"]
        chunked[1]._attention_backend, chunked[1]._parallel_config = "flash", None
        blocks.detach()
        assert [block.attn1.processor, block.attn2.processor] == own
        assert [processor._attention_backend for processor in own] == ["_native_math", "flash"]
        assert [processor._parallel_config for processor in own] == [None, None]

    def test_a_models_attention_backend_reaches_the_chunked_attention(self) -> None:
        model = WanTransformer3DModel(num_attention_heads=1, num_layers=2, ffn_dim=128, text_dim=64)
        ChunkedBlocks(model.blocks, 100)
        # diffusers sets the backend for all models of the process; the context restores the former one.
        with attention_backend("native"), Operations() as operations:
            model.set_attention_backend("_native_math")
            model.blocks[0](*inputs_of(20, 1, torch.float32))
        backends = [processor._attention_backend for processor in model.attn_processors.values()]
        assert backends == ["_native_math"] * 4
        assert operations.attended == [], "the math backend is not a fused attention"

    def test_hooks_of_diffusers_go_around_it(self, block: WanTransformerBlock) -> None:
        class Doubling(ModelHook):
            def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
                return output * 2

        inputs = inputs_of(300, 2, torch.float32)
        expected = block(*inputs) * 2
        blocks = ChunkedBlocks([block], 256)
        registry = HookRegistry.check_if_exists_or_initialize(block)
        registry.register_hook(Doubling(), "doubling")
        with Operations() as operations:
            assert torch.equal(block(*inputs), expected)
        assert 256 in operations.rows
        with pytest.raises(RuntimeError, match="a hook wraps block 0: remove it"):
            blocks.detach()
        with Operations() as operations:
            block(*inputs)
        assert 256 in operations.rows, "nothing was changed"

    def test_it_is_attached_before_other_hooks(self, block: WanTransformerBlock) -> None:
        other = block_of(1, 128, torch.float32)
        HookRegistry.check_if_exists_or_initialize(block).register_hook(ModelHook(), "first")
        with pytest.raises(RuntimeError, match="a hook wraps block 1: attach the chunked forward before"):
            ChunkedBlocks([other, block], 100)
        assert "forward" not in vars(other)

    def test_another_processor_is_refused(self, block: WanTransformerBlock) -> None:
        class Other(type(block.attn2.processor)):  # type: ignore[misc]
            pass

        block.attn2.set_processor(Other())
        with pytest.raises(ValueError, match="block 0 has the attention processor Other"):
            ChunkedBlocks([block], 100)

    @pytest.mark.slow  # several whole models
    def test_it_compiles_into_one_graph(self, block: WanTransformerBlock) -> None:
        inputs = inputs_of(300, 2, torch.float32)
        expected = block(*inputs)
        ChunkedBlocks([block], 256)
        block.compile(backend="eager", fullgraph=True)
        assert torch.equal(block(*inputs), expected)


class TestOnADevice:
    @pytest.mark.parametrize("chunk", [1024, 4096])
    def test_values_and_peak_of_the_real_width(self, gpu: Accelerator, chunk: int) -> None:
        """Compare peak memory and results of one A14B block at 832x480x33."""
        gpu.need_kernels("a block of the real width takes minutes on a CPU")
        tokens = VideoShape(width=832, height=480, frames=33).tokens
        block = block_of(40, 13824, torch.bfloat16).to("cuda")
        hidden, text, modulation, rotary = inputs_of(tokens, 40, torch.bfloat16)
        inputs = [hidden.cuda(), text.cuda(), modulation.cuda(), tuple(table.cuda() for table in rotary)]
        expected = block(*inputs)
        ChunkedBlocks([block], chunk)
        block(*inputs)  # libraries take their workspaces
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = block(*inputs)
        peak = torch.cuda.max_memory_allocated() - before + inputs[0].nbytes
        assert (found.float() - expected.float()).norm() <= 2e-3 * expected.float().norm()
        predicted = T2V_A14B.working_bytes(tokens, lanes=1, chunk_tokens=chunk)
        assert 0.9 * predicted <= peak <= 1.05 * predicted
