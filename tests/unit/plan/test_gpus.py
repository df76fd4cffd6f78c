"""Preset GPUs become machines; an unknown GPU is refused with the list of the known ones."""

from __future__ import annotations

import pytest

from wanstream.plan.machine import GPUS, UnknownGpuError, expected_machine
from wanstream.schema import T2V_A14B

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
    assert machine.h2d_bytes_per_s is not None
    assert machine.h2d_pageable_bytes_per_s is not None
    assert machine.h2d_pageable_bytes_per_s < machine.h2d_bytes_per_s < gpu.lanes * gpu.pcie * 1e9
    assert (machine.ram_bytes, machine.disk_bytes_per_s) == (2**35, 3.5e9)


@pytest.mark.parametrize(("name", "published_s"), [("A100 80GB", 2735.7), ("RTX 5090", 4549)])
def test_published_times_of_wan_come_out(name: str, published_s: float) -> None:
    """1280x720x81, 40 steps with guidance; one FLOPS share for all GPUs is within a tenth of each of these."""
    machine = expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=3.5e9)
    flops = 40 * 2 * T2V_A14B.blocks * T2V_A14B.block_flops(75_600)
    assert flops / machine.flops_per_s == pytest.approx(published_s, rel=0.13)


@pytest.mark.parametrize("name", ["rtx4090", "NVIDIA GeForce RTX 4090", "  RTX 4090 ", "rtx-4090"])
def test_spelling_does_not_count(name: str) -> None:
    assert expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=1e9).name == "RTX 4090"


@pytest.mark.parametrize("name", ["RTX 9090", "4090", ""])
def test_an_unknown_gpu_is_answered_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UnknownGpuError) as refused:
        expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=1e9)
    for known in ASKED_FOR:
        assert known in str(refused.value)
