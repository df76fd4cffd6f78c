"""Runs with compiled blocks: one graph for a session's changes, results as with eager blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.testing.experts import make_lora, save_lora
from wanstream.testing.quantised import q4_k_m, save_expert_gguf
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora
from wanstream.wan.transformer.compiled_block import get_compiler

EAGER, TRACED = "eager", "aot_eager"
"""torch backends that trace graphs without compiling, so results are bit-equal to eager blocks."""

LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = {
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(1, 1),
    "resident": OffloadPolicy.resident(source="pinned"),
}


pytestmark = pytest.mark.usefixtures("exact_blocks")  # as traced by compiled blocks


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pair(open_pair: Callable[..., ExpertPair]) -> ExpertPair:
    return open_pair(layers=2)


def graphs() -> int:
    """Count torch's compilations since the test began."""
    return int(counters["stats"]["unique_graphs"])


def latents_of(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE
) -> torch.Tensor:
    return denoise(pair, request, policy=policy, device="cpu").latents


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.slow  # compiles blocks
def test_two_experts_a_switch_a_lora_and_a_second_queue_need_one_graph(
    open_pair: Callable[..., ExpertPair],
    make_request: Callable[..., DenoiseRequest],
    make_tiny_expert: Callable[..., Any],
    tmp_path: Path,
) -> None:
    pair, again = open_pair(layers=2), open_pair(layers=2)
    save_lora(
        make_lora(make_tiny_expert(layers=2), seed=3),
        tmp_path / "lora.safetensors",
        dtype=torch.float32,
    )
    lora = open_lora(tmp_path / "lora.safetensors")
    first, other = make_request(), make_request(guidance=(1.0, 5.0), solver="unipc", batch=2)
    long = make_request(
        positive=torch.randn(1, 11, 4096, generator=torch.Generator().manual_seed(4))
    )
    step_plan: list[tuple[ExpertPair, DenoiseRequest, str, float]] = [
        (pair, first, "layerwise", 0.0),
        (pair, first, "layerwise", 0.0),
        (pair, other, "layerwise", 1.0),
        (pair, long, "block swap", 0.5),
        (pair, first, "resident", 0.0),
        (again, first, "layerwise", 1.0),
    ]

    def run() -> list[torch.Tensor]:
        every = []
        for experts, request, policy, strength in step_plan:
            experts.set_loras([(lora, strength)], [(lora, -strength)])
            every.append(latents_of(experts, request, POLICIES[policy]))
        return every

    plain = run()
    assert graphs() == 0, "nothing is compiled that was not requested"
    before = get_compiler(TRACED).graphs
    for experts in (pair, again):
        experts.close()
        experts.kernels = Kernels(compiler=TRACED)
    compiled = run()
    assert graphs() == get_compiler(TRACED).graphs - before == 1
    assert not counters["graph_break"]
    for one, own in zip(compiled, plain, strict=True):
        assert torch.equal(one, own)
    assert len({tensor.sum().item() for tensor in plain}) == 4, (
        "of the six runs three are the same one"
    )


@pytest.mark.slow
def test_the_second_size_gets_a_graph_that_serves_any(pair: ExpertPair, make_request: Any) -> None:
    requests = [make_request(noise=torch.randn(1, 16, 2, 4, width)) for width in (6, 8, 10, 6, 14)]
    plain = [latents_of(pair, request) for request in requests]
    pair.kernels = Kernels(compiler=EAGER)
    counted = []
    for request, expected in zip(requests, plain, strict=True):
        assert torch.equal(latents_of(pair, request), expected)
        counted.append(graphs())
    assert counted == [1, 2, 2, 2, 2]


@pytest.mark.slow
def test_weights_that_are_decoded_on_arrival_need_no_graph_of_their_own(
    make_request: Callable[..., DenoiseRequest],
    make_tiny_expert: Callable[..., Any],
    tiny_expert_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folders = [tiny_expert_folder(seed=seed, layers=2) for seed in (1, 2)]
    packed = [tmp_path / f"{seed}.gguf" for seed in (1, 2)]
    for seed, file in enumerate(packed):
        save_expert_gguf(make_tiny_expert(seed=seed, layers=2), file, types=q4_k_m, seed=seed)
    request = make_request()
    for files, storage in ((folders, "as stored"), (folders, "fp8"), (packed, "as stored")):
        with open_experts(*files, compute_dtype=torch.float32, storage=storage) as pair:
            plain = latents_of(pair, request)
            pair.kernels = Kernels(compiler=EAGER)
            assert torch.equal(latents_of(pair, request), plain)
    assert graphs() == 1


@pytest.mark.slow  # compiles blocks
def test_a_run_is_cancelled_between_compiled_blocks_and_the_next_ones_are_whole(
    pair: ExpertPair, make_request: Callable[..., DenoiseRequest]
) -> None:
    request = make_request()
    plain = latents_of(pair, request)
    pair.kernels = Kernels(compiler=EAGER)
    polls: list[bool] = []

    def stop_in_the_second_step() -> bool:
        polls.append(True)
        return len(polls) == 4

    with pytest.raises(SamplingCancelled) as cancelled:
        denoise(pair, request, policy=LAYERWISE, device="cpu", should_stop=stop_in_the_second_step)
    assert (cancelled.value.step, cancelled.value.block) == (1, 1)
    assert torch.equal(latents_of(pair, request), plain)
    assert graphs() == 1
    pair.kernels = Kernels()
    assert torch.equal(latents_of(pair, request), plain)
    models = pair.engine(LAYERWISE, "cpu").models.bare.values()
    assert not any("forward" in vars(block) for model in models for block in model.blocks)


@pytest.mark.slow  # compiles blocks
def test_a_step_in_which_blocks_were_compiled_teaches_nothing(
    pair: ExpertPair, make_request: Callable[..., DenoiseRequest]
) -> None:
    records: list[StepRecord] = []

    def run() -> None:
        denoise(pair, make_request(), policy=LAYERWISE, device="cpu", revise=records.append)

    pair.kernels = Kernels(compiler=EAGER)
    run()
    assert records == []
    run()
    assert [record.index for record in records] == [0]


@pytest.mark.slow
def test_two_texts_against_each_other_need_one_graph_more(
    pair: ExpertPair, make_request: Any
) -> None:
    request = make_request(guidance=(1.0, 1.0))
    with_nag = changed_request(request, nag=Nag(scale=5.0))
    plain = [latents_of(pair, each) for each in (request, with_nag)]
    assert not torch.equal(*plain)
    pair.kernels = Kernels(compiler=EAGER)
    for each, expected in zip((request, with_nag, request, with_nag), plain * 2, strict=True):
        assert torch.equal(latents_of(pair, each), expected)
    assert graphs() == 2


@pytest.mark.slow
def test_inductor_computes_the_same_with_one_graph(
    pair: ExpertPair,
    make_request: Callable[..., DenoiseRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The compiler's cache would return kernels for wider vector units than ATEN_CPU_CAPABILITY
    # allows.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    request = make_request()
    plain = latents_of(pair, request)
    pair.kernels = Kernels(compiler=INDUCTOR)
    first, second = latents_of(pair, request), latents_of(pair, request)
    assert graphs() == 1
    assert torch.equal(first, second)
    assert 0 < difference(first, plain) < 1e-5
