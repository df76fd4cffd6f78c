"""Choice of dtype for `compute_dtype="auto"`: units of the device, settings that disable them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from wanstream.devices import auto_dtype, common_dtype, resolve_dtype
from wanstream.devices.cuda import CudaRuntime
from wanstream.schema.refs import ExpertsRef
from wanstream.wan.experts.open import open_experts, open_pair
from wanstream.wan.text import open_text_encoder

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
CPU = torch.device("cpu")


@pytest.fixture
def pretend_cpu(monkeypatch):
    """Pretend to have a CPU with these units and limits."""

    def pretend(bf16=False, amx=False, level="AVX512", onednn=True) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
        mkldnn = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: onednn)
        monkeypatch.setattr(torch.ops, "mkldnn", mkldnn)

    return pretend


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ({"bf16": True}, BF16),
        ({"amx": True}, BF16),
        ({}, FP32),
        ({"bf16": True, "level": "AVX2"}, FP32),
        ({"bf16": True, "onednn": False}, FP32),
        ({"level": "DEFAULT"}, FP32),
    ],
    ids=["avx512-bf16", "amx", "avx512", "torch kept to avx2", "onednn kept to avx2", "not x86"],
)
def test_a_cpu_computes_in_bf16_only_with_units_in_use(cpu, expected, pretend_cpu):
    pretend_cpu(**cpu)
    assert auto_dtype(CPU) == expected


def test_a_torch_without_these_queries_computes_in_fp32(pretend_cpu, monkeypatch):
    pretend_cpu(bf16=True)
    for query in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, query)
    assert auto_dtype(CPU) == FP32


UNITS = [((9, 0), BF16), ((8, 0), BF16), ((7, 5), FP16), ((7, 0), FP16), ((5, 2), FP32)]


@pytest.mark.parametrize(("capability", "expected"), UNITS)
def test_a_gpu_computes_in_the_first_with_units(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert CudaRuntime(torch.device("cuda", 0)).auto_dtype() == expected


def test_a_choice_wins_and_several_devices_use_the_widest():
    assert resolve_dtype(FP16, CPU) == FP16
    assert resolve_dtype("auto", CPU) == auto_dtype(CPU)
    assert common_dtype([BF16, FP16]) == FP16
    assert common_dtype([FP16, FP32, BF16]) == FP32


@pytest.mark.parametrize("units", [False, True])
def test_auto_dtype_of_models(units, tiny_expert_file, tiny_pipeline, pretend_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pretend_cpu(bf16=units)
    file = tiny_expert_file()
    expected = BF16 if units else FP32
    ref = ExpertsRef(high_noise=file, single=True)
    with open_experts(file, file) as pair, open_pair(ref) as one:
        assert pair.compute_dtype == one.compute_dtype == expected
        named = open_experts(file, file, compute_dtype=expected)
        assert pair.block_bytes.computed == named.block_bytes.computed
    with open_text_encoder(tiny_pipeline()) as encoder:
        assert encoder._compute_dtype == expected
    with pytest.raises(ValueError, match=r"compute_dtype is bf16; .*'auto' can be computed with"):
        open_experts(file, file, compute_dtype="bf16")


@pytest.mark.slow
def test_a_process_kept_to_avx2_computes_in_fp32():
    code = "from wanstream.devices import auto_dtype; print(auto_dtype('cpu'))"
    limits = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=limits, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "torch.float32"
