"""Compute kernels for blocks: choices, refusals with messages, effect on the computation."""

from __future__ import annotations

import importlib.util
from typing import get_args

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

from wanstream.block_kernels import ATTENTIONS, EXACT, INDUCTOR
from wanstream.block_kernels.attention import Kernels, KernelsError, check_installed, check_usable
from wanstream.schema.refs import Attention
from wanstream.tests.support.wan.blocks import Operations, block_inputs, computed, diffusers_block
from wanstream.wan.transformer.block import BlockSettings, WanBlock

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
FP32 = torch.float32
BF16 = torch.bfloat16
IMPORTS = {"flash": "flash_attn", "flash 3": "flash_attn_interface", "sage": "sageattention"}
IMPORTS |= {"int8": "comfy_kitchen", "xformers": "xformers"}
PACKAGES = {name: kernel.package for name, kernel in ATTENTIONS.items() if kernel.package}


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
