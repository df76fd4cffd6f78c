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
from torch.utils._python_dispatch import TorchDispatchMode

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
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import Attention, ExpertsRef
from wanstream.tests.support.wan_blocks import block_inputs, computed, diffusers_block
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import ExpertsRegistry, open_experts, open_pair
from wanstream.wan.transformer.block import BlockSettings, WanBlock

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
LAYERWISE = OffloadPolicy.layerwise(1)
IMPORTS = {
    "flash": "flash_attn",
    "flash 3": "flash_attn_interface",
    "sage": "sageattention",
    "int8": "comfy_kitchen",
    "xformers": "xformers",
}
PACKAGES = {name: kernel.package for name, kernel in ATTENTIONS.items() if kernel.package}


class Operations(TorchDispatchMode):
    """Recorder for torch operation names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def fused(self) -> bool:
        return any("flash_attention" in name for name in self.names)


@pytest.fixture
def files(tiny_expert_folder: Callable[..., Path]) -> list[Path]:
    return [tiny_expert_folder(seed=seed, layers=2) for seed in (1, 2)]


@pytest.fixture
def pair(files: list[Path]) -> Iterator[ExpertPair]:
    with open_experts(*files, compute_dtype=torch.float32) as pair:
        yield pair


def test_every_choice_is_one_of_diffusers() -> None:
    assert set(ATTENTIONS) == set(get_args(Attention)) == {"default", "sdpa", "cudnn", *IMPORTS}
    for kernel in ATTENTIONS.values():
        assert kernel.backend is None or kernel.backend in _AttentionBackendRegistry._backends


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named_with_a_way_out(
    name: Attention, files: list[Path]
) -> None:
    if importlib.util.find_spec(IMPORTS[name]) is not None:
        pytest.skip(f"{IMPORTS[name]} is installed")
    with pytest.raises(KernelsError) as refused:
        check_installed(Kernels(attention=name))
    for words in (repr(name), PACKAGES[name], "install it", "'default', 'sdpa', 'cudnn'"):
        assert words in str(refused.value)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(
        KernelsError, match="attention is 'radial': choose one of 'default', 'sdpa', 'cudnn'"
    ):
        check_installed(Kernels(attention="radial"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_kernel_for_gpus_and_half_precision_is_refused_elsewhere(
    device: torch.device, dtype: torch.dtype
) -> None:
    cudnn = Kernels(attention="cudnn")
    if device == CPU:
        with pytest.raises(
            KernelsError,
            match="'cudnn' computes on CUDA devices only, and this is cpu: choose 'sdpa'",
        ):
            check_usable(cudnn, device, dtype)
    elif dtype == torch.float32:
        with pytest.raises(
            KernelsError,
            match="'cudnn' computes in bf16 and fp16 only, and the blocks compute in float32",
        ):
            check_usable(cudnn, device, dtype)
    else:
        check_usable(cudnn, device, dtype)


def test_compiling_needs_what_writes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Kernels(compiler=INDUCTOR)
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(
            KernelsError, match="for cuda:0 with Triton, which is not installed: install triton"
        ):
            check_usable(compiled, GPU, torch.bfloat16)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        KernelsError, match=r"none of c\+\+, g\+\+, clang\+\+, cl is on the path: install one, or"
    ):
        check_usable(compiled, CPU, torch.float32)
    check_usable(Kernels(compiler="eager"), CPU, torch.float32)


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_choice_is_what_computes_attention(chunk: int | None) -> None:
    settings = BlockSettings()
    block = WanBlock(diffusers_block(), settings)

    def fused(attention: Attention) -> bool:
        settings.set(Kernels(attention=attention), EXACT, chunk)
        with torch.no_grad(), attention_backend("_native_math"), Operations() as operations:
            computed(block, *block_inputs(9))
        return operations.fused

    # "default" follows diffusers' process-wide setting. An explicit choice does not.
    assert [fused(each) for each in ("default", "sdpa", "default")] == [False, True, False]


def test_kernels_change_between_runs_and_those_that_do_not_serve_leave_the_former(
    pair: ExpertPair,
) -> None:
    engine = pair.engine(LAYERWISE, "cpu")
    pair.kernels = Kernels(attention="cudnn")
    with pytest.raises(KernelsError, match="CUDA"):
        pair.engine(LAYERWISE, "cpu")
    assert engine.models.settings.backend is None
    pair.kernels = Kernels(attention="sdpa")
    assert pair.engine(replace(LAYERWISE, chunk_tokens=8), "cpu") is engine
    settings = engine.models.settings
    assert settings.backend == settings.self_backend == ATTENTIONS["sdpa"].backend
    assert settings.chunk_tokens == 8


def test_no_kernels_change_while_a_run_goes_on(pair: ExpertPair) -> None:
    engine = pair.engine(LAYERWISE, "cpu")
    with engine.run(step_visits(["high"], engine.block_counts)):
        pair.kernels = Kernels(attention="sdpa")
        with pytest.raises(
            RuntimeError, match="kernels cannot be changed while this engine is running"
        ):
            pair.engine(LAYERWISE, "cpu")
    assert pair.engine(LAYERWISE, "cpu") is engine


def test_the_experts_stay_open_when_only_their_kernels_are_others(files: list[Path]) -> None:
    ref = ExpertsRef(high_noise=files[0], low_noise=files[1], compute_dtype="float32")
    registry = ExpertsRegistry(open_pair)
    pair = registry.get(ref)
    engine = pair.engine(LAYERWISE, "cpu")
    assert registry.get(replace(ref, attention="sdpa", compile=True)) is pair
    assert pair.kernels == Kernels(attention="sdpa", compiler=INDUCTOR)
    missing = [name for name in PACKAGES if importlib.util.find_spec(IMPORTS[name]) is None]
    for name in missing:
        with pytest.raises(KernelsError):
            registry.get(replace(ref, attention=name))
    assert registry.get(ref) is pair
    assert pair.kernels == Kernels()
    assert pair.engine(LAYERWISE, "cpu") is engine
    registry.free()
