"""Preset GPUs become machines. An unknown GPU is refused with a list of known ones."""

from __future__ import annotations

import pytest

from wanstream.plan.machine import GPUS, UnknownGpuError, expected_machine
from wanstream.shapes import T2V_A14B, VideoShape
from wanstream.tests.support.plan_fixtures import run_shape, visit_seconds

ASKED_FOR = (
    "RTX 3060 12GB",
    "RTX 3090",
    "RTX 4060 Ti 16GB",
    "RTX 4070",
    "RTX 4080",
    "RTX 4090",
    "RTX 5060 Ti 16GB",
    "RTX 5070 Ti",
    "RTX 5080",
    "RTX 5090",
    "A100 40GB",
    "A100 80GB",
    "L40S",
    "H100",
    "H100 PCIe",
    "H200",
)


@pytest.mark.parametrize("name", ASKED_FOR)
def test_presets(name: str) -> None:
    machine = expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=3.5e9)
    gpu = GPUS[name]
    assert machine.name == name
    assert gpu.source.startswith("NVIDIA")
    assert gpu.source in machine.origin
    assert "derived" in machine.origin
    assert machine.vram_bytes == gpu.vram_gib * 2**30
    assert 0.3 * gpu.tflops < machine.flops_per_s / 1e12 < 0.7 * gpu.tflops
    assert machine.bus is not None
    paged, locked = machine.bus.h2d_pageable_bytes_per_s, machine.bus.h2d_bytes_per_s
    assert paged < locked < gpu.lanes * gpu.pcie * 1e9
    assert (machine.ram_bytes, machine.disk_bytes_per_s) == (2**35, 3.5e9)


@pytest.mark.parametrize(("name", "published_s"), [("A100 80GB", 2735.7), ("RTX 5090", 4549)])
def test_published_times_of_wan_come_out(name: str, published_s: float) -> None:
    """1280x720x81, 40 steps with guidance.

    One FLOPS share for all GPUs is within a tenth of each of these.
    """
    machine = expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=3.5e9)
    flops = 40 * 2 * T2V_A14B.blocks * T2V_A14B.block_flops(75_600)
    assert flops / machine.flops_per_s == pytest.approx(published_s, rel=0.13)


@pytest.mark.parametrize(
    ("name", "int8", "fp8"),
    [
        ("RTX 4090", 3.0, 1.15),
        ("RTX 5090", 3.0, 1.31),
        ("RTX 3090", 3.0, None),
        ("RTX 3060 12GB", 3.0, None),
        ("A100 80GB", 12 / 7, None),
        ("L40S", 12 / 7, 0.70),
        ("H100", 12 / 13, 0.73),
        ("H200", 12 / 13, 0.85),
    ],
)
def test_speed_ups_include_the_time_of_quantising(
    name: str, int8: float, fp8: float | None
) -> None:
    machine = expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=3.5e9)
    expected = {"int8": int8} if fp8 is None else {"int8": int8, "fp8": fp8}
    assert machine.block.linear_speedups == pytest.approx(expected, rel=0.01)


def ratio_to_bf16(card: str, linear_format: str, size: tuple[int, int, int]) -> tuple[float, float]:
    """Return a visit's predicted time relative to bf16, and the linear layers' share in FLOPs."""
    width, height, frames = size
    tokens = VideoShape(width=width, height=height, frames=frames).tokens
    machine = expected_machine(card, ram_bytes=2**36, disk_bytes_per_s=5e9)
    usual, other = (
        run_shape(expert=T2V_A14B, tokens=tokens, linear_format=each)
        for each in ("", linear_format)
    )
    linear = T2V_A14B.linear_flops(tokens) / T2V_A14B.block_flops(tokens)
    return visit_seconds(other, machine, "high") / visit_seconds(usual, machine, "high"), linear


@pytest.mark.parametrize(
    ("size", "int8", "fp8"),
    [((832, 480, 17), 0.41, 0.61), ((832, 480, 81), 0.65, 0.76), ((1280, 720, 81), 0.79, 0.86)],
)
def test_a_block_of_a_4090_in_8_bits(size: tuple[int, int, int], int8: float, fp8: float) -> None:
    """Ratios to bf16 at peak rates alone, and quantising time as a share of linear layers."""
    for linear_format, at_peak, quantising in (("int8", int8, 1 / 12), ("fp8", fp8, 0.371)):
        found, linear = ratio_to_bf16("RTX 4090", linear_format, size)
        assert found == pytest.approx(at_peak + quantising * linear, abs=0.011), (
            f"{linear_format}: {found:.3f}"
        )


@pytest.mark.parametrize(("frames", "measured"), [(17, 0.1375 / 0.1189), (81, 0.8365 / 0.7648)])
def test_fp8_is_not_expected_to_be_faster_than_measured_on_an_h100(
    frames: int, measured: float
) -> None:
    """Measured on resident weights, multiplied as stored.

    The file is benchmarks/results/arithmetic-gpu_nvidia-h100-80gb-hbm3_20261126.json.
    """
    found, _ = ratio_to_bf16("H100", "fp8", (832, 480, frames))
    assert measured <= found < measured + 0.15


@pytest.mark.parametrize("name", ["rtx4090", "NVIDIA GeForce RTX 4090", "  RTX 4090 ", "rtx-4090"])
def test_spelling_does_not_count(name: str) -> None:
    assert expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=1e9).name == "RTX 4090"


@pytest.mark.parametrize("name", ["RTX 9090", "4090", ""])
def test_an_unknown_gpu_is_answered_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UnknownGpuError) as refused:
        expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=1e9)
    for known in ASKED_FOR:
        assert known in str(refused.value)
