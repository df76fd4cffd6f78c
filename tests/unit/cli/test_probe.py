"""`wanstream probe` prints measured figures and the stored profile's path."""

import json
import re
from pathlib import Path

import pytest

from wanstream.cli import main
from wanstream.cli.probe import probe_table
from wanstream.host.machine_profile import Profile
from wanstream.plan import Machine
from wanstream.plan.machine import expected_machine
from wanstream.shapes import VideoShape

VIDEO = VideoShape(width=832, height=480, frames=81)


def test_table(tmp_path):
    gpu = expected_machine("RTX 4090", ram_bytes=64_000_000_000, disk_bytes_per_s=3.456e9)
    notes = ("disk: past the page cache",)
    lines = probe_table(Profile(machine=gpu, notes=notes, kept_in=tmp_path), VIDEO).splitlines()
    assert lines[0] == "RTX 4090"
    figures = dict(re.split(r" {2,}", line.strip()) for line in lines[1:-2])
    assert figures["RAM"] == "64.0 GB"
    assert figures["file to RAM"] == "3.46 GB/s"
    assert figures["a Wan block at 832x480x81"] == "90.86 TFLOP/s"
    assert "RAM to GPU, page-locked, while computing" in figures
    assert lines[-2:] == ["disk: past the page cache", f"stored in {tmp_path}"]
    cpu = gpu.with_figures(computes_on="cpu", vram_bytes=0)
    table = probe_table(Profile(machine=cpu, notes=(), kept_in=None), VIDEO)
    assert "GPU" not in table
    assert table.endswith("not stored: see above")


def test_wrong_arguments(refusal):
    for option, said in (
        ("--size big", "write WIDTHxHEIGHTxFRAMES"),
        ("--models /nowhere/at/all", "no such file or folder"),
    ):
        assert f"{option}: {said}" in refusal("probe", "--device", "cpu", *option.split())


@pytest.mark.slow
def test_this_machine_is_measured_and_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(bytes(50_000_000))
    here = ["--device", "cpu", "--models", str(weights), "--json"]
    assert main(["probe", *here]) == 0
    data = json.loads(capsys.readouterr().out)
    machine = Machine.from_dict(data["machine"])
    assert Path(data["kept_in"]).is_file()
    run = ["--gpu", "this", "--size", "480x272x17", "--ram", "64", "--steps", "2"]
    assert main(["plan", *run, *here]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["machine"] == {**machine.to_dict(), "ram_bytes": 64 * 2**30}
