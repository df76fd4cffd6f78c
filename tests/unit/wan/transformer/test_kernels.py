"""Compute kernels for blocks: choices, refusals with messages, effect on the computation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

from wanstream.block_kernels import (
    ATTENTIONS,
    EXACT,
    INDUCTOR,
    Kernels,
    check_installed,
    check_usable,
)
from wanstream.block_kernels.attention import KernelsError
from wanstream.plan.programs import step_visits
from wanstream.schema.refs import Attention, ExpertsRef
from wanstream.tests.support.wan.blocks import Operations, block_inputs, computed, diffusers_block
from wanstream.tests.support.wan.opened_experts import LAYERWISE
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import ExpertsRegistry, open_experts, open_pair
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
FP32 = torch.float32
BF16 = torch.bfloat16
IMPORTS = {
    "flash": "flash_attn",
    "flash 3": "flash_attn_interface",
    "sage": "sageattention",
    "int8": "comfy_kitchen",
    "xformers": "xformers",
}
PACKAGES = {name: kernel.package for name, kernel in ATTENTIONS.items() if kernel.package}


@pytest.fixture
def files(tiny_expert_folder: Callable[..., Path]) -> list[Path]:
    return [tiny_expert_folder(seed=seed, layers=2) for seed in (1, 2)]


@pytest.fixture
def pair(files: list[Path]) -> Iterator[ExpertPair]:
    with open_experts(*files, compute_dtype=FP32) as pair:
        yield pair


def test_every_choice_is_one_of_diffusers():
    assert set(ATTENTIONS) == set(get_args(Attention)) == {"default", "sdpa", "cudnn", *IMPORTS}
    for kernel in ATTENTIONS.values():
        assert kernel.backend is None or kernel.backend in _AttentionBackendRegistry._backends


@pytest.mark.parametrize("name", PACKAGES)
def test_missing_package_is_named_with_a_way_out(name):
    if importlib.util.find_spec(IMPORTS[name]) is not None:
        pytest.skip(f"{IMPORTS[name]} is installed")
    with pytest.raises(KernelsError) as refused:
        check_installed(Kernels(attention=name))
    for words in (repr(name), PACKAGES[name], "install it", "'default', 'sdpa', 'cudnn'"):
        assert words in str(refused.value)


def test_unknown_choice_is_refused():
    said = "attention is 'radial': choose one of 'default', 'sdpa', 'cudnn'"
    with pytest.raises(KernelsError, match=said):
        check_installed(Kernels(attention="radial"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        (CPU, BF16, "'cudnn' computes on CUDA devices only, and this is cpu: choose 'sdpa'"),
        (GPU, FP32, "'cudnn' computes in bf16 and fp16 only, and the blocks compute in float32"),
    ],
)
def test_kernel_for_gpus_and_half_precision(device, dtype, said):
    cudnn = Kernels(attention="cudnn")
    check_usable(cudnn, GPU, BF16)
    with pytest.raises(KernelsError, match=said):
        check_usable(cudnn, device, dtype)


def test_compiling_needs_what_writes_the_kernels(monkeypatch):
    compiled = Kernels(compiler=INDUCTOR)
    if importlib.util.find_spec("triton") is None:
        said = "for cuda:0 with Triton, which is not installed: install triton"
        with pytest.raises(KernelsError, match=said):
            check_usable(compiled, GPU, BF16)
    monkeypatch.setenv("PATH", "")
    said = r"none of c\+\+, g\+\+, clang\+\+, cl is on the path: install one, or"
    with pytest.raises(KernelsError, match=said):
        check_usable(compiled, CPU, FP32)
    check_usable(Kernels(compiler="eager"), CPU, FP32)


@pytest.mark.parametrize("chunk", [None, 4])
def test_choice_is_what_computes_attention(chunk):
    settings = BlockSettings()
    block = WanBlock(diffusers_block(), settings)

    def fused(attention: Attention) -> bool:
        settings.set(Kernels(attention=attention), EXACT, chunk)
        with torch.no_grad(), attention_backend("_native_math"), Operations() as operations:
            computed(block, *block_inputs(9))
        return bool(operations.arguments("flash_attention"))

    # "default" follows diffusers' process-wide setting. An explicit choice does not.
    assert [fused(each) for each in ("default", "sdpa", "default")] == [False, True, False]


def test_kernels_change_between_runs_only(pair):
    """Kernels that cannot be used leave the former ones."""
    engine = pair.engine(LAYERWISE, "cpu")
    pair.kernels = Kernels(attention="cudnn")
    with pytest.raises(KernelsError, match="CUDA"):
        pair.engine(LAYERWISE, "cpu")
    assert engine.models.settings.backend is None
    pair.kernels = Kernels(attention="sdpa", math="exact", compiler="eager")
    with engine.run(step_visits(["high"], engine.block_counts)):
        said = "kernels cannot be changed while this engine is running"
        with pytest.raises(RuntimeError, match=said):
            pair.engine(LAYERWISE, "cpu")
    assert pair.engine(replace(LAYERWISE, chunk_tokens=8), "cpu") is engine
    settings = engine.models.settings
    assert settings.backend == settings.self_backend == ATTENTIONS["sdpa"].backend
    found = (settings.math, settings.compiler, settings.chunk_tokens)
    assert found == (EXACT, get_compiler("eager"), 8)


def test_experts_stay_open_when_only_their_kernels_change(files):
    ref = ExpertsRef(high_noise=files[0], low_noise=files[1], compute_dtype="float32")
    registry = ExpertsRegistry(open_pair)
    pair = registry.get(ref)
    engine = pair.engine(LAYERWISE, "cpu")
    assert registry.get(replace(ref, attention="sdpa", compile=True)) is pair
    assert pair.kernels == Kernels(attention="sdpa", compiler=INDUCTOR)
    for name in PACKAGES:
        if importlib.util.find_spec(IMPORTS[name]) is None:
            with pytest.raises(KernelsError):
                registry.get(replace(ref, attention=name))
    assert registry.get(ref) is pair
    assert pair.kernels == Kernels()
    assert pair.engine(LAYERWISE, "cpu") is engine
    registry.free()
