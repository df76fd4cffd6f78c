"""Compiled block forwards: number of graphs, order of attaching, complete detaching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from wanstream.wan.transformer.block_kernels import BlockKernels
from wanstream.wan.transformer.chunked_block import ChunkedAttention
from wanstream.wan.transformer.compiled_block import BlockCompiler, CompiledBlocks, get_compiler
from wanstream.wan.transformer.kernels import Kernels

D = 128


class Counting(BlockCompiler):
    """Compiler that runs graphs eagerly and records their numbers of nodes."""

    def __init__(self) -> None:
        super().__init__("eager")
        self.nodes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.nodes.append(len(graph.graph.nodes))
        return super().__call__(graph, inputs)


@pytest.fixture
def blocks() -> list[WanTransformerBlock]:
    torch.manual_seed(0)
    made = [WanTransformerBlock(D, 256, 1, cross_attn_norm=True) for _ in range(2)]
    return [block.eval().requires_grad_(False) for block in made]


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def inputs(tokens: int = 9, words: int = 3) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(tokens)
    angles = torch.randn(1, tokens, 1, D, generator=draw)
    shapes = (1, tokens, D), (1, words, D), (1, 6, D)
    return (*(torch.randn(shape, generator=draw) for shape in shapes), (angles.cos(), angles.sin()))


def test_one_graph_for_blocks_texts_and_tokens_in_any_layout(blocks: list[WanTransformerBlock]) -> None:
    hidden, text, *others = inputs()
    transposed = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    given = [(hidden, text), (transposed, text), (hidden, inputs(words=5)[1]), (hidden, inputs(words=2)[1])]
    plain = [block(tokens, words, *others) for block in blocks for tokens, words in given]
    compiler = Counting()
    CompiledBlocks(blocks, compiler)
    found = [block(tokens, words, *others) for block in blocks for tokens, words in given]
    assert compiler.graphs == len(compiler.nodes) == 1
    for one, expected in zip(found, plain, strict=True):
        assert torch.equal(one, expected)


def test_replaced_weights_need_no_new_graph(blocks: list[WanTransformerBlock]) -> None:
    """Visits bind other buffers, and LoRAs change resident tensors: both replace parameters."""
    compiler = Counting()
    CompiledBlocks(blocks[:1], compiler)
    before = blocks[0](*inputs())
    for name, parameter in list(blocks[0].named_parameters()):
        path, _, leaf = name.rpartition(".")
        memory = torch.empty(parameter.nbytes + 256, dtype=torch.uint8)[256:].view(parameter.dtype)
        view = memory.view(parameter.shape).copy_(2 * parameter)
        blocks[0].get_submodule(path)._parameters[leaf] = torch.nn.Parameter(view, requires_grad=False)
    after = blocks[0](*inputs())
    assert compiler.graphs == 1
    assert not torch.equal(before, after)
    blocks_own = WanTransformerBlock.forward(blocks[0], *inputs())
    assert torch.equal(after, blocks_own)


def test_hooks_lie_outside_or_are_refused(blocks: list[WanTransformerBlock]) -> None:
    blocks[1].forward = lambda *given: WanTransformerBlock.forward(blocks[1], *given)
    with pytest.raises(RuntimeError, match="a hook wraps block 1: attach the compiled forward before any other hook"):
        CompiledBlocks(blocks, get_compiler("eager"))
    assert "forward" not in vars(blocks[0])
    del blocks[1].forward
    compiled = CompiledBlocks(blocks, get_compiler("eager"))
    ours = blocks[0].forward
    blocks[0].forward = lambda *given: ours(*given)
    with pytest.raises(RuntimeError, match="a hook wraps block 0: remove it before"):
        compiled.detach()
    assert "forward" in vars(blocks[1])
    blocks[0].forward = ours
    compiled.detach()
    compiled.detach()
    assert not any("forward" in vars(block) for block in blocks)


def test_chunks_go_without_graphs_and_both_come_and_go(
    blocks: list[WanTransformerBlock], caplog: pytest.LogCaptureFixture
) -> None:
    plain, kernels = blocks[0](*inputs()), BlockKernels(blocks)
    compiled = Kernels(compiler="eager")
    before = get_compiler("eager").graphs
    assert kernels.graphs == 0
    for chosen, chunk, graphs in (
        (compiled, None, 1),
        (compiled, 4, 1),
        (Kernels(), 4, None),
        (compiled, 4, 1),
        (compiled, None, 1),
    ):
        caplog.clear()
        kernels.set(chosen, chunk)
        assert ("4 tokens at once to save memory: they are not compiled" in caplog.text) == (
            chosen == compiled and chunk == 4
        )
        assert torch.allclose(blocks[0](*inputs()), plain, rtol=1e-5, atol=1e-5)
        assert isinstance(blocks[0].attn1.processor, ChunkedAttention) == (chunk is not None)
        assert kernels.graphs == (0 if graphs is None else before + graphs)
    kernels.set(Kernels(), None)
    assert not any("forward" in vars(block) for block in blocks)
    assert torch.equal(blocks[0](*inputs()), plain)
