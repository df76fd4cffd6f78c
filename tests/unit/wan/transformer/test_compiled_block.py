"""Compiled blocks: graph counts, and chunks without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from wanstream.block_kernels import EXACT, Int8Linear, Kernels
from wanstream.block_kernels.multiplication import Multiplications
from wanstream.tests.support.wan.blocks import block_inputs, computed, diffusers_block
from wanstream.wan.measurement.meter import _set_codes
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import BlockCompiler, get_compiler


class Counting(BlockCompiler):
    """Compiler that runs graphs eagerly and records their node counts."""

    def __init__(self) -> None:
        super().__init__("eager")
        self.nodes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.nodes.append(len(graph.graph.nodes))
        return super().__call__(graph, inputs)


@pytest.fixture
def originals() -> list[WanTransformerBlock]:
    return [diffusers_block(seed=seed) for seed in range(2)]


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def test_one_graph_for_blocks_texts_and_layouts(originals):
    compiler = Counting()
    blocks = [WanBlock(each, BlockSettings(compiler=compiler)) for each in originals]
    hidden, text, *others = block_inputs(9, words=3)
    transposed = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    given = [(hidden, text), (transposed, text)]
    given += [(hidden, block_inputs(9, words=words)[1]) for words in (5, 2)]
    for block, original in zip(blocks, originals, strict=True):
        for inputs in given:
            assert torch.equal(computed(block, *inputs, *others), original(*inputs, *others))
    assert compiler.graphs == len(compiler.nodes) == 1


def test_replaced_weights_need_no_new_graph(originals):
    """Visits bind other buffers, and LoRAs change resident tensors: both replace parameters."""
    compiler = Counting()
    block = WanBlock(originals[0], BlockSettings(compiler=compiler))
    before = computed(block, *block_inputs(9))
    for name, parameter in list(block.named_parameters()):
        path, _, leaf = name.rpartition(".")
        memory = torch.empty(parameter.nbytes + 256, dtype=torch.uint8)[256:].view(parameter.dtype)
        view = memory.view(parameter.shape).copy_(2 * parameter)
        block.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(view, requires_grad=False)
    after = computed(block, *block_inputs(9))
    assert compiler.graphs == 1
    assert not torch.equal(before, after)
    assert torch.equal(after, computed(block, *block_inputs(9), compiler=None))


def test_loras_of_any_rank_beside_int8_need_no_new_graph(originals, monkeypatch):
    """With a patch, comfy-kitchen's kernel cannot activate tokens: no graph may depend on it."""
    monkeypatch.setattr(Int8Linear, "compute", Int8Linear._by_torch)
    compiler = Counting()
    block = WanBlock(originals[0], BlockSettings(compiler=compiler))
    layers = _set_codes(block, "int8", 0)
    Multiplications(device=torch.device("cpu")).prepare(layers)
    given, results = block_inputs(9), []
    for rank in (0, 4, 8):
        for layer in layers:
            assert isinstance(layer, Int8Linear)
            layer.kitchen_dtype = 2
            if rank:
                layer.patch_up = torch.ones(layer.out_features, rank)
                layer.patch_down = torch.ones(rank, layer.in_features)
        results.append(computed(block, *given))
    assert compiler.graphs == 1
    assert not torch.equal(results[0], results[1])


def test_chunks_go_without_graphs_and_both_come_and_go(originals, caplog):
    settings = BlockSettings()
    compiled = Kernels(compiler="eager")
    block = WanBlock(originals[0], settings)
    plain = originals[0](*block_inputs(9))
    before = get_compiler("eager").graphs
    assert settings.graphs == 0
    chunks = ((compiled, None), (compiled, 4), (Kernels(), 4), (compiled, 4), (compiled, None))
    for chosen, chunk in chunks:
        caplog.clear()
        settings.set(chosen, EXACT, chunk)
        warned = "4 tokens at once to save memory: they are not compiled" in caplog.text
        assert warned == (chosen == compiled and chunk == 4)
        assert torch.allclose(computed(block, *block_inputs(9)), plain, rtol=1e-5, atol=1e-5)
        assert settings.graphs == (0 if chosen == Kernels() else before + 1)
    settings.set(replace(compiled, compiler=None), EXACT, None)
    assert torch.equal(computed(block, *block_inputs(9)), plain)
