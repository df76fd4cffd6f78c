"""Machines: figures through JSON, impossible ones, and preset GPUs."""

from __future__ import annotations

import json
import math

import pytest

from wanstream.plan.machine import GPUS, Machine, UnknownGpuError, expected_machine
from wanstream.shapes import T2V_A14B, VideoShape
from wanstream.tests.support.plan_fixtures import rated, rated_cpu, run_shape, visit_seconds


def test_json_keeps_a_machine():
    int8 = rated(linear_speedups={"int8": 3.0})
    for machine in (rated(), rated_cpu(), int8):
        assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert [int8.block.linear_speedup(name) for name in ("int8", "fp8", "")] == [3.0, 1.0, 1.0]
    stored_before = int8.to_dict()
    del stored_before["linear_speedups"]
    assert Machine.from_dict(stored_before) == rated()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_speedups": {"int8": 0.0}}, "linear_speedups of int8 of test is 0.0, it must be"),
        ({"linear_speedups": {"int4": 2.0}}, "linear_speedups of test has 'int4', choose from"),
        ({"linear_speedups": 2.0}, "not a machine: linear_speedups is 2.0"),
        ({"computes_on": "tpu"}, "computes_on is 'tpu'"),
        ({"vram_bytes": 0}, "vram_bytes of test is 0, it must be a number above 0"),
        ({"h2d_bytes_per_s": None}, "h2d_bytes_per_s of test is None"),
        ({"flops_per_s": -1.0}, "flops_per_s of test is -1.0"),
        ({"flops_per_s": math.nan}, "flops_per_s of test is nan"),
        ({"flops_per_s": math.inf}, "flops_per_s of test is inf"),
        ({"ram_bytes": "32 GB"}, "ram_bytes of test is '32 GB'"),
        ({"ram_bytes": True}, "ram_bytes of test is True"),
        ({"speed": 1.0}, "not a machine"),
        ({"name": 5}, "not a machine"),
    ],
)
def test_impossible_figures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Machine.from_dict({**rated().to_dict(), **changes})
    with pytest.raises(ValueError, match="not a machine"):
        Machine.from_dict({"name": "x"})


# --- preset GPUs ----------------------------------------------------------------------------------


def preset(name: str) -> Machine:
    return expected_machine(name, ram_bytes=2**35, disk_bytes_per_s=3.5e9)


@pytest.mark.parametrize("name", GPUS)
def test_presets(name):
    machine = preset(name)
    gpu = GPUS[name]
    assert machine.name == name
    assert gpu.source.startswith("NVIDIA")
    assert gpu.source in machine.origin
    assert "derived" in machine.origin
    assert machine.vram_bytes == gpu.vram_gib * 2**30
    assert 0.3 * gpu.tflops < machine.flops_per_s / 1e12 < 0.7 * gpu.tflops
    paged = machine.bus.h2d_pageable_bytes_per_s
    assert paged < machine.bus.h2d_bytes_per_s < gpu.lanes * gpu.pcie * 1e9
    assert (machine.ram_bytes, machine.disk_bytes_per_s) == (2**35, 3.5e9)
    for unknown in ("RTX 9090", "4090", ""):
        with pytest.raises(UnknownGpuError, match=name):
            preset(unknown)


@pytest.mark.parametrize("name", ["rtx4090", "NVIDIA GeForce RTX 4090", "  RTX 4090 ", "rtx-4090"])
def test_spelling_does_not_count(name):
    assert preset(name).name == "RTX 4090"


@pytest.mark.parametrize(("name", "published_s"), [("A100 80GB", 2735.7), ("RTX 5090", 4549)])
def test_published_times_of_wan_come_out(name, published_s):
    """1280x720x81, 40 steps with guidance.

    One FLOPS share for all GPUs is within a tenth of each of these.
    """
    flops = 40 * 2 * T2V_A14B.blocks * T2V_A14B.block_flops(75_600)
    assert flops / preset(name).flops_per_s == pytest.approx(published_s, rel=0.13)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RTX 4090", {"int8": 3.0, "fp8": 1.15}),
        ("RTX 5090", {"int8": 3.0, "fp8": 1.31}),
        ("RTX 3090", {"int8": 3.0}),
        ("A100 80GB", {"int8": 12 / 7}),
        ("L40S", {"int8": 12 / 7, "fp8": 0.70}),
        ("H100", {"int8": 12 / 13, "fp8": 0.73}),
        ("H200", {"int8": 12 / 13, "fp8": 0.85}),
    ],
)
def test_speed_ups_include_the_time_of_quantising(name, expected):
    assert preset(name).block.linear_speedups == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("frames", "measured"), [(17, 0.1375 / 0.1189), (81, 0.8365 / 0.7648)])
def test_fp8_speedup_is_that_measured_on_an_h100(frames, measured):
    """Measured on resident weights, multiplied as stored.

    The file is benchmarks/results/arithmetic-gpu_nvidia-h100-80gb-hbm3_20261126.json.
    """
    tokens = VideoShape(width=832, height=480, frames=frames).tokens
    runs = (run_shape(expert=T2V_A14B, tokens=tokens, linear_format=each) for each in ("", "fp8"))
    bf16_s, fp8_s = (visit_seconds(run, preset("H100"), "high") for run in runs)
    assert measured <= fp8_s / bf16_s < measured + 0.15
