"""Self-attention in int8: reasons against it in words, the test, and settings coming and going."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from wanstream.block_kernels import EXACT, Kernels, check_usable
from wanstream.block_kernels import int8_attention as module
from wanstream.block_kernels.attention import KernelsError
from wanstream.tests.support.int8_attention import exact_attention, kitchen, quantised_attention
from wanstream.tests.support.wan_blocks import block_inputs, computed, diffusers_block
from wanstream.wan import Nag
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INT8 = Kernels(attention="int8")
D, HEADS, TOKENS = 128, 2, 40


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


def set_kernels(blocks: list[WanBlock], kernels: Kernels, chunk: int | None = None) -> None:
    blocks[0].settings.set(kernels, EXACT, chunk)


def inputs() -> tuple[Any, ...]:
    return block_inputs(TOKENS, HEADS, words=3)


def without(name: str) -> ModuleType:
    old = kitchen()
    delattr(old, name)
    return old


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (without("int8_attention"), "it has no int8_attention: update it"),
        (without("int8_attention_is_available"), "it has no int8_attention: update it"),
        (
            kitchen(capable=False),
            "its int8_attention needs a GPU of compute capability 7.5 or later",
        ),
        (kitchen(quantised_attention), None),
    ],
)
def test_each_state_of_the_package_has_a_reason(
    found: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kitchen_refusal", lambda device: None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", found)
    assert module.int8_attention_refusal(CPU, torch.bfloat16) == reason


def test_a_kernel_that_cannot_be_used_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(disabled=True))
    words = (
        "attention 'int8' needs comfy-kitchen's kernel, which cannot be used on cuda:0: its CUDA "
        "backend is disabled in this process; or choose 'sdpa'"
    )
    with pytest.raises(KernelsError) as refused:
        check_usable(INT8, GPU, torch.bfloat16)
    assert str(refused.value) == words
    with pytest.raises(
        KernelsError, match="'int8' computes on CUDA devices only, and this is cpu: choose 'sdpa'"
    ):
        check_usable(INT8, CPU, torch.bfloat16)


@pytest.mark.parametrize("broken", [None, "values of other heads", "NaN", "error"])
def test_a_kernel_is_refused_if_its_result_is_wrong(
    broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if broken == "error":
            raise NotImplementedError("no kernel image\nmore")
        found = quantised_attention(
            query, key, value.flip(1) if broken == "values of other heads" else value
        )
        return found * torch.nan if broken == "NaN" else found

    monkeypatch.setattr(module, "kitchen_refusal", lambda device: None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(attention))
    reason = module.int8_attention_refusal(CPU, torch.bfloat16)
    if broken is None:
        assert reason is None
    else:
        assert ("no kernel image)" if broken == "error" else "its attention is wrong") in str(
            reason
        )


@pytest.mark.slow  # several whole models
@pytest.mark.parametrize("chunk", [None, 8])
def test_it_computes_self_attention_only_and_copies_nothing_for_it(
    chunk: int | None, blocks: list[WanBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[torch.Tensor] = []

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        received.extend(qkv)
        return exact_attention(*qkv)

    given = inputs()
    set_kernels(blocks, Kernels(attention="sdpa"), chunk)
    plain = computed(blocks[0], *given)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(attention))
    set_kernels(blocks, INT8, chunk)
    assert torch.equal(computed(blocks[0], *given), plain)
    assert [each.shape for each in received] == [(1, HEADS, TOKENS, D)] * 3
    assert all(each.transpose(1, 2).is_contiguous() for each in received)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen())
    module.int8_dispatch.cache_clear()
    set_kernels(blocks, replace(INT8, compiler="eager"), chunk)
    found = computed(blocks[0], *given)
    assert 0 < (found - plain).norm() < 0.02 * plain.norm()


def test_everything_is_restored_in_any_order(
    blocks: list[WanBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen())
    backends, given = dict(_AttentionBackendRegistry._backends), inputs()
    # By chunk: a CPU may multiply a few rows in another order than many.
    plain = {}
    for chunk in (None, 8):
        set_kernels(blocks, Kernels(), chunk)
        plain[chunk] = computed(blocks[0], *given)
    for chosen, chunk in (
        (INT8, None),
        (INT8, 8),
        (Kernels(), 8),
        (INT8, 8),
        (INT8, None),
        (Kernels(), None),
    ):
        set_kernels(blocks, chosen, chunk)
        made = computed(blocks[0], *given)
        assert torch.equal(made, plain[chunk]) == (chosen == Kernels())
    assert _AttentionBackendRegistry._backends == backends


@pytest.mark.parametrize("chunk", [None, 8])
def test_it_works_with_two_texts(
    chunk: int | None, blocks: list[WanBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen(exact_attention))
    hidden, text, *others = inputs()
    found = []
    for chosen in (Kernels(attention="sdpa"), INT8):
        set_kernels(blocks, chosen, chunk)
        found.append(computed(blocks[0], hidden, (text, 2 * text), *others))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # several whole models
def test_one_graph_serves_all_blocks(
    blocks: list[WanBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen())
    before = get_compiler("eager").graphs
    found = []
    for chosen in (INT8, replace(INT8, compiler="eager"), INT8, replace(INT8, compiler="eager")):
        set_kernels(blocks, chosen)
        found.append([computed(block, *inputs()) for block in blocks])
    assert get_compiler("eager").graphs == before + 1
    for each in found[1:]:
        for one, expected in zip(each, found[0], strict=True):
            assert torch.allclose(one, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
