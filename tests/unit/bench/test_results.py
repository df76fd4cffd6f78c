"""Result files and their machine: file names, reading, and the newest file for each case first."""

import getpass
import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from wanstream.bench import Result, results
from wanstream.bench.results import describe_machine, device_name, hardware, hardware_name, versions
from wanstream.benchmarks.pages.performance import provenance
from wanstream.benchmarks.record import newest_results

RESULT = Result(
    case="engine",
    method="as it was",
    figures={"wall_s": [1.5, 2.0]},
    hardware={"name": "cpu-2-cores", "ram_gb": 25.3},
    versions={"torch": "2.13", "python": "3.11"},
    date="2026-11-21",
)


def test_result_is_read_as_it_was_written(tmp_path):
    path = RESULT.save(tmp_path)
    assert path.name == "engine_cpu-2-cores_20261121.json"
    names = ["case", "method", "figures", "hardware", "versions", "date"]
    assert [*json.loads(path.read_text())] == names
    assert provenance(RESULT) == "2026-11-21, cpu-2-cores, 25.3 GB RAM; torch 2.13, python 3.11"
    for case, day in (("x", "2026-11-20"), ("x", "2026-11-19"), ("y", "2026-11-01")):
        replace(RESULT, case=case, date=day).save(tmp_path)
    newest = newest_results(tmp_path)
    assert newest["engine"] == RESULT
    dates = {case: found.date for case, found in newest.items() if case != "engine"}
    assert dates == {"x": "2026-11-20", "y": "2026-11-01"}


def test_commit_of_another_project_is_not_recorded(monkeypatch):
    inside_this_checkout = Path(results.__file__).parents[1] / "offload" / "engine"
    monkeypatch.setattr(results, "__file__", str(inside_this_checkout / "results.py"))
    assert versions()["commit"] == "unknown (not a git checkout)"


def test_report_names_the_machine_and_nothing_private():
    words = describe_machine(torch.device("cpu"))
    assert words.keys() == {"Device", "Processor", "RAM", "System", "Versions"}
    assert words["Device"] == "CPU"
    assert torch.__version__ in words["Versions"]
    assert words["RAM"].endswith("GB")
    said = " ".join(words.values())
    assert str(Path.home()) not in said
    assert platform.node() not in said.split()
    assert f"/{getpass.getuser()}" not in said


def test_report_names_another_device_and_the_build_of_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    words = describe_machine(torch.device("mps", 0))
    assert words["Device"] == "MPS"
    assert words["Versions"].endswith("HIP 6.4")
    assert hardware_name(torch.device("mps", 0)) == f"mps-{os.cpu_count()}-cores"


def test_gpu_is_named_with_its_memory(gpu):
    device = gpu.device
    assert device_name(device).startswith(gpu.runtime.name())
    assert device_name(device).endswith("GB")
    if gpu.machine is None:
        assert str(torch.version.cuda or torch.version.hip) in describe_machine(device)["Versions"]


def test_result_names_its_machine_and_versions(tmp_path):
    machine = hardware(torch.device("cpu"))
    assert machine["name"] == f"cpu-{os.cpu_count()}-cores"
    assert machine["ram_gb"] > 0
    found = versions(("safetensors", "no-such-library"))
    assert found.keys() == {"torch", "safetensors", "python", "commit"}
    assert all(isinstance(value, str) and value for value in found.values())
    made = Result(case="a", method="", figures={})
    assert made.hardware["cores"] > 0
    assert {"torch", "python", "commit"} <= made.versions.keys()
    assert made.save(tmp_path).name.startswith(f"a_{made.hardware['name']}_2")
