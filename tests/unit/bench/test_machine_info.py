from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path

import pytest
import torch

from wanstream.bench.machine_info import describe_machine, device_name, hardware, versions


def test_a_report_names_the_machine_and_nothing_private() -> None:
    words = describe_machine(torch.device("cpu"))
    assert words.keys() == {"Device", "Processor", "RAM", "System", "Versions"}
    assert words["Device"] == "CPU"
    assert torch.__version__ in words["Versions"]
    assert words["RAM"].endswith("GB")
    said = " ".join(words.values())
    assert str(Path.home()) not in said
    assert platform.node() not in said.split()
    assert f"/{getpass.getuser()}" not in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_named_with_its_memory() -> None:
    device = torch.device("cuda", 0)
    assert device_name(device).startswith(torch.cuda.get_device_properties(0).name)
    assert device_name(device).endswith("GB")
    assert str(torch.version.cuda) in describe_machine(device)["Versions"]


def test_a_result_names_its_machine_and_versions() -> None:
    machine = hardware(torch.device("cpu"))
    assert machine["name"] == f"cpu-{os.cpu_count()}-cores"
    assert machine["ram_gb"] > 0
    found = versions(("safetensors", "no-such-library"))
    assert found.keys() == {"torch", "safetensors", "python", "commit"}
    assert all(isinstance(value, str) and value for value in found.values())
