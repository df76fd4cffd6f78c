"""Self-attention in int8: reasons against it in words, the test, and settings coming and going."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from wanstream.block_kernels import EXACT, Kernels, check_usable
from wanstream.block_kernels import int8_attention as module
from wanstream.block_kernels.attention import KernelsError
from wanstream.tests.support.wan.blocks import block_inputs, computed, diffusers_block
from wanstream.tests.support.wan.int8_attention import exact_attention, kitchen, quantised_attention
from wanstream.wan import Nag
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
SDPA = Kernels(attention="sdpa")
INT8 = Kernels(attention="int8")
COMPILED = replace(INT8, compiler="eager")
HEADS = 2
TOKENS = 40


@pytest.fixture(autouse=True)
def _untested() -> Iterator[None]:
    module.int8_attention_refusal.cache_clear()
    module.int8_dispatch.cache_clear()
    with torch.no_grad():
        yield
    module.int8_attention_refusal.cache_clear()
    module.int8_dispatch.cache_clear()


@pytest.fixture
def blocks() -> list[WanBlock]:
    settings = BlockSettings(nag=Nag())
    return [WanBlock(diffusers_block(HEADS, seed=seed), settings) for seed in range(2)]


@pytest.fixture
def install(monkeypatch):
    """Install a module under comfy-kitchen's name."""

    def install(*given: object, **how: object) -> None:
        monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(*given, **how))
        module.int8_dispatch.cache_clear()

    return install


@pytest.fixture
def compute(blocks):
    """Compute the first block with these kernels."""

    def compute(kernels: Kernels, chunk: int | None = None, given=None) -> torch.Tensor:
        blocks[0].settings.set(kernels, EXACT, chunk)
        return computed(blocks[0], *(given or inputs()))

    return compute


def inputs() -> tuple:
    return block_inputs(TOKENS, HEADS, words=3)


def without(name: str) -> ModuleType:
    old = kitchen()
    delattr(old, name)
    return old


OLD = "it has no int8_attention: update it"
SMALL = "its int8_attention needs a GPU of compute cap"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (without("int8_attention"), OLD),
        (without("int8_attention_is_available"), OLD),
        (kitchen(capable=False), f"{SMALL}ability 7.5 or later"),
        (kitchen(quantised_attention), None),
    ],
)
def test_each_state_of_the_package_has_a_reason(found, reason, monkeypatch):
    monkeypatch.setattr(module, "kitchen_refusal", lambda device: None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", found)
    assert module.int8_attention_refusal(CPU, BF16) == reason


def test_an_unusable_kernel_is_refused_with_a_way_out(monkeypatch, install):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    install(disabled=True)
    needs = "attention 'int8' needs comfy-kitchen's kernel, which cannot be used on cuda:0"
    with pytest.raises(KernelsError) as refused:
        check_usable(INT8, GPU, BF16)
    why = "its CUDA backend is disabled in this process; or choose 'sdpa'"
    assert str(refused.value) == f"{needs}: {why}"
    words = "'int8' computes on CUDA devices only, and this is cpu: choose 'sdpa'"
    with pytest.raises(KernelsError, match=words):
        check_usable(INT8, CPU, BF16)


def raising(*qkv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel image\nmore")


def swapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return quantised_attention(query, key, value.flip(1))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (quantised_attention, None),
        (swapped, "its attention is wrong"),
        (lambda *qkv: quantised_attention(*qkv) * torch.nan, "its attention is wrong"),
        (raising, "no kernel image)"),
    ],
    ids=["right", "values of other heads", "NaN", "error"],
)
def test_a_kernel_with_wrong_results_is_refused(attention, reason, monkeypatch, install):
    monkeypatch.setattr(module, "kitchen_refusal", lambda device: None)
    install(attention)
    found = module.int8_attention_refusal(CPU, BF16)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.slow  # several whole models
@pytest.mark.parametrize("chunk", [None, 8])
def test_it_computes_self_attention_only_without_copies(chunk, compute, install):
    received: list[torch.Tensor] = []

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        received.extend(qkv)
        return exact_attention(*qkv)

    plain = compute(SDPA, chunk)
    install(attention)
    assert torch.equal(compute(INT8, chunk), plain)
    assert [each.shape for each in received] == [(1, HEADS, TOKENS, 128)] * 3
    assert all(each.transpose(1, 2).is_contiguous() for each in received)
    install()
    assert 0 < (compute(COMPILED, chunk) - plain).norm() < 0.02 * plain.norm()


def test_everything_is_restored_in_any_order(compute, install):
    install()
    backends = dict(_AttentionBackendRegistry._backends)
    # By chunk: a CPU may multiply a few rows in another order than many.
    plain = {chunk: compute(Kernels(), chunk) for chunk in (None, 8)}
    courses = ((INT8, None), (INT8, 8), (Kernels(), 8), (INT8, 8), (INT8, None), (Kernels(), None))
    for kernels, chunk in courses:
        assert torch.equal(compute(kernels, chunk), plain[chunk]) == (kernels == Kernels())
    assert _AttentionBackendRegistry._backends == backends


@pytest.mark.parametrize("chunk", [None, 8])
def test_it_works_with_two_texts(chunk, compute, install):
    install(exact_attention)
    hidden, text, *others = inputs()
    given = (hidden, (text, 2 * text), *others)
    found, expected = (compute(kernels, chunk, given) for kernels in (INT8, SDPA))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # several whole models
def test_one_graph_serves_all_blocks(blocks, install):
    torch._dynamo.reset()
    install()
    before = get_compiler("eager").graphs
    found = []
    for kernels in (INT8, COMPILED) * 2:
        blocks[0].settings.set(kernels, EXACT, None)
        found.append(torch.stack([computed(block, *inputs()) for block in blocks]))
    assert get_compiler("eager").graphs == before + 1
    for each in found[1:]:
        assert torch.allclose(each, found[0], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
