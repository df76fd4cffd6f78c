"""Runs with compiled blocks: one graph for a session's changes, results as with eager blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora, save_lora
from wanstream.tests.support.sampling.runs import (
    LAYERWISE,
    OpenPair,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.tests.support.wan.pipelines import distance
from wanstream.wan import ExpertPair, Nag
from wanstream.wan.lora.file import open_lora
from wanstream.wan.transformer.compiled_block import get_compiler

EAGER = Kernels(compiler="eager")
TRACED = Kernels(compiler="aot_eager")
"""torch backends that trace graphs without compiling, so results are bit-equal to eager blocks."""
SWAP = OffloadPolicy.block_swap(1, 1)
RESIDENT = OffloadPolicy.resident(source="pinned")

# As traced by compiled blocks.
pytestmark = [pytest.mark.usefixtures("exact_blocks"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pair(open_pair: OpenPair) -> ExpertPair:
    return open_pair(layers=2)


def graphs() -> int:
    """Count torch's compilations since the test began."""
    return int(counters["stats"]["unique_graphs"])


def test_two_experts_a_switch_and_a_lora_need_one_graph(
    open_pair, make_request, make_tiny_expert, tmp_path
):
    pairs = [open_pair(layers=2) for _ in range(2)]
    path = tmp_path / "lora.safetensors"
    save_lora(make_lora(make_tiny_expert(layers=2), seed=3), path, dtype=torch.float32)
    lora = open_lora(path)
    first = make_request()
    other = make_request(guidance=(1.0, 5.0), solver="unipc", batch=2)
    plan = [
        (0, first, LAYERWISE, 0.0),
        (0, first, LAYERWISE, 0.0),
        (0, other, LAYERWISE, 1.0),
        (0, make_request(positive=normal(1, 11, 4096, seed=4)), SWAP, 0.5),
        (0, first, RESIDENT, 0.0),
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
    for pair in pairs:
        pair.close()
        pair.kernels = TRACED
    assert all(map(torch.equal, every(), plain))
    assert graphs() == get_compiler(TRACED.compiler).graphs - before == 1
    assert not counters["graph_break"]
    assert len({tensor.sum().item() for tensor in plain}) == 4, "three of the six runs are the same"


def test_the_second_size_gets_a_graph_that_serves_any(pair, make_request):
    requests = [make_request(noise=torch.randn(1, 16, 2, 4, width)) for width in (6, 8, 10, 6, 14)]
    plain = [latents_of(pair, request) for request in requests]
    counted = []
    pair.kernels = EAGER
    for request, expected in zip(requests, plain, strict=True):
        assert torch.equal(latents_of(pair, request), expected)
        counted.append(graphs())
    assert counted == [1, 2, 2, 2, 2]


def test_a_step_in_which_blocks_were_compiled_revises_nothing(pair, make_request):
    records = []
    pair.kernels = EAGER
    for count in (0, 1):
        run(pair, make_request(), revise=records.append)
        assert [record.index for record in records] == [0] * count


def test_two_texts_against_each_other_need_one_graph_more(pair, make_request):
    request = make_request(guidance=(1.0, 1.0))
    requests: list[DenoiseRequest] = [request, changed_request(request, nag=Nag(scale=5.0))]
    plain = [latents_of(pair, each) for each in requests]
    assert not torch.equal(*plain)
    pair.kernels = EAGER
    for each, expected in zip(requests * 2, plain * 2, strict=True):
        assert torch.equal(latents_of(pair, each), expected)
    assert graphs() == 2


def test_inductor_computes_the_same_with_one_graph(pair, make_request, tmp_path, monkeypatch):
    # The compiler's cache would return kernels for wider vector units than ATEN_CPU_CAPABILITY
    # allows.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    request = make_request()
    plain = latents_of(pair, request)
    pair.kernels = Kernels(compiler=INDUCTOR)
    first, second = latents_of(pair, request), latents_of(pair, request)
    assert graphs() == 1
    assert torch.equal(first, second)
    assert 0 < distance(first, plain) < 1e-5
