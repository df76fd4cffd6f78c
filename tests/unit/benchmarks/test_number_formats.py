"""Whole-run error in each number format, on smaller experts than the recorded ones."""

import pytest

from wanstream.benchmarks import number_formats as benchmark
from wanstream.testing import TinyShape


@pytest.mark.slow  # draws many charts
def test_convrot_is_closer_to_fp32_than_fp8(monkeypatch, tmp_path):
    small = {"STEPS": 4, "SWITCH": 2, "LATENT": (1, 16, 1, 8, 8)}
    small["SHAPE"] = TinyShape(layers=2, heads=2, ffn_dim=1024)
    for name, value in small.items():
        monkeypatch.setattr(benchmark, name, value)
    reference, cases = benchmark.made_files(tmp_path)
    *_, expected = benchmark.steps_of(reference)
    last = {name: [*benchmark.steps_of(case)][-1] for name, case in cases.items()}
    errors = {name: benchmark.distance(each, expected) for name, each in last.items()}
    assert errors["bf16"] < errors["int8 ConvRot"] < errors["int8 ConvRot, in int8"]
    assert errors["int8 ConvRot, in int8"] < 0.9 * errors["fp8_scaled"] < errors["nvfp4"]
    assert errors["int8 ConvRot, in int8"] < 0.5 * errors["int8 rows, in int8"]
