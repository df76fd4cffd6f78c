from __future__ import annotations

import getpass
import platform
from pathlib import Path

import pytest
import torch

from wanstream.metrics.surroundings import device_name, surroundings


def test_a_report_says_what_it_was_measured_on_and_nothing_private() -> None:
    words = surroundings(torch.device("cpu"))
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
    assert str(torch.version.cuda) in surroundings(device)["Versions"]
