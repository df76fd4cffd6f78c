"""Compiled blocks and runs with them: graph counts, chunks without graphs, equal results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from wanstream.block_kernels import EXACT, INDUCTOR, Int8Linear, Kernels
from wanstream.block_kernels.multiplication import Multiplications
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora, save_lora
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.runs import (
    LAYERWISE,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.tests.support.wan.blocks import block_inputs, computed, diffusers_block
from wanstream.wan import Nag, open_lora
from wanstream.wan.measurement.meter import _set_codes
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import BlockCompiler, get_compiler


class Counting(BlockCompiler):
    """Compiler that runs graphs eagerly and records their node counts."""

    def __init__(self) -> None:
        super().__init__("eager")
        self.nodes: list[int] = []

    def __call__(self, graph, inputs):
        self.nodes.append(len(graph.graph.nodes))
        return super().__call__(graph, inputs)


@pytest.fixture
def originals():
    return [diffusers_block(seed=seed) for seed in range(2)]


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def test_one_graph_for_blocks_texts_and_layouts(originals):
    compiler = Counting()
    blocks = [WanBlock(each, BlockSettings(compiler=compiler)) for each in originals]
    hidden, text, *others = block_inputs(9, words=3)
    given = [(hidden, text), (hidden.transpose(1, 2).contiguous().transpose(1, 2), text)]
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


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_loras_of_any_rank_beside_codes_need_no_new_graph(codes, originals, monkeypatch):
    """With a patch, comfy-kitchen's kernel cannot activate tokens: no graph may depend on it."""
    monkeypatch.setattr(Int8Linear, "compute", Int8Linear._by_torch)
    compiler = Counting()
    given = block_inputs(9)
    results = []
    for original in originals:
        block = WanBlock(original, BlockSettings(compiler=compiler))
        layers = _set_codes(block, codes, 0)
        Multiplications(device=torch.device("cpu")).prepare(layers)
        for rank in (0, 4, 8):
            for layer in layers:
                layer.kitchen_dtype = 2
                if rank:
                    layer.patch_up = torch.ones(layer.out_features, rank)
                    layer.patch_down = torch.ones(rank, layer.in_features)
            results.append(computed(block, *given, compiler=compiler))
            for layer in layers:
                layer.kitchen_dtype = None
            assert torch.equal(results[-1], computed(block, *given, compiler=None))
    assert compiler.graphs == 1, "for both blocks"
    assert not counters["graph_break"]
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


EAGER = Kernels(compiler="eager")
TRACED = Kernels(compiler="aot_eager")
"""torch backends that trace graphs without compiling, so results are bit-equal to eager blocks."""


@pytest.fixture
def pair(open_pair, exact_blocks):
    """A pair with the blocks that compiled ones trace."""
    return open_pair(layers=2)


def graphs() -> int:
    """Count torch's compilations since the test began."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow  # several loop runs
def test_experts_and_loras_need_one_graph(
    pair, open_pair, make_request, make_tiny_expert, tmp_path
):
    pairs = [pair, open_pair(layers=2)]
    path = tmp_path / "lora.safetensors"
    save_lora(make_lora(make_tiny_expert(layers=2), seed=3), path, dtype=torch.float32)
    lora = open_lora(path)
    first = make_request()
    plan = [
        (0, first, LAYERWISE, 0.0),
        (0, first, LAYERWISE, 0.0),
        (0, make_request(guidance=(1.0, 5.0), solver="unipc", batch=2), LAYERWISE, 1.0),
        (0, make_request(positive=normal(1, 11, 4096, seed=4)), OffloadPolicy.block_swap(1), 0.5),
        (0, first, OffloadPolicy.resident(source="pinned"), 0.0),
        (1, first, LAYERWISE, 1.0),
    ]

    def every() -> list[torch.Tensor]:
        found = []
        for at, request, policy, strength in plan:
            pairs[at].set_loras([(lora, strength)], [(lora, -strength)])
            found.append(latents_of(pairs[at], request, policy))
        return found

    plain = every()
    assert graphs() == 0, "nothing is compiled that was not requested"
    before = get_compiler(TRACED.compiler).graphs
    for each in pairs:
        each.close()
        each.kernels = TRACED
    assert all(map(torch.equal, every(), plain))
    assert graphs() == get_compiler(TRACED.compiler).graphs - before == 1
    assert not counters["graph_break"]
    assert len({tensor.sum().item() for tensor in plain}) == 4, "three of the six runs are the same"


@pytest.mark.slow  # several loop runs
def test_the_second_size_gets_a_graph_that_serves_any(pair, make_request):
    requests = [make_request(noise=torch.randn(1, 16, 2, 4, width)) for width in (6, 8, 10, 6, 14)]
    plain = [latents_of(pair, request) for request in requests]
    counted = []
    pair.kernels = EAGER
    for request, expected in zip(requests, plain, strict=True):
        assert torch.equal(latents_of(pair, request), expected)
        counted.append(graphs())
    assert counted == [1, 2, 2, 2, 2]


@pytest.mark.slow  # several loop runs
def test_a_step_in_which_blocks_were_compiled_revises_nothing(pair, make_request):
    records = []
    pair.kernels = EAGER
    for count in (0, 1):
        run(pair, make_request(), revise=records.append)
        assert [record.index for record in records] == [0] * count


@pytest.mark.slow  # several loop runs
def test_two_texts_against_each_other_need_one_graph_more(pair, make_request):
    request = make_request(guidance=(1.0, 1.0))
    requests = [request, changed_request(request, nag=Nag(scale=5.0))]
    plain = [latents_of(pair, each) for each in requests]
    assert not torch.equal(*plain)
    pair.kernels = EAGER
    for each, expected in zip(requests * 2, plain * 2, strict=True):
        assert torch.equal(latents_of(pair, each), expected)
    assert graphs() == 2


@pytest.mark.slow  # several loop runs
def test_inductor_computes_the_same_with_one_graph(pair, make_request, tmp_path, monkeypatch):
    # The compiler's cache would return kernels for wider vector units than ATEN_CPU_CAPABILITY
    # allows.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    request = make_request()
    plain = latents_of(pair, request)
    pair.kernels = Kernels(compiler=INDUCTOR)
    first = latents_of(pair, request)
    second = latents_of(pair, request)
    assert graphs() == 1
    assert torch.equal(first, second)
    assert 0 < distance(first, plain) < 1e-5
