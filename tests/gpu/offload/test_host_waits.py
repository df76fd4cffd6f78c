"""Host waits: every product function that waits for a device is listed, others are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanstream.devices import clock_for
from wanstream.tests.support.accelerator import HOST_WAITS, Accelerator, checked_accelerator

pytestmark = pytest.mark.checked
ROOT = Path(__file__).parents[3]


def waits(gpu: Accelerator) -> None:
    torch.zeros(1, device=gpu.device)
    clock_for(gpu.device).settle()


def test_a_wait_that_is_not_listed_is_reported(monkeypatch):
    with checked_accelerator(0) as gpu:
        waits(gpu)
    monkeypatch.delitem(HOST_WAITS, "devices/clock.py settle")
    words = r"waits for the device in devices/clock\.py settle: remove it"
    with pytest.raises(AssertionError, match=words):
        with checked_accelerator(0) as gpu:
            waits(gpu)


def test_waits_of_a_test_itself_are_not_counted():
    with checked_accelerator(0) as gpu:
        assert float(torch.ones(1, device=gpu.device)) == 1.0
        assert gpu.machine is not None
        assert not gpu.machine.host_waits


@pytest.mark.parametrize("name", HOST_WAITS)
def test_listed_functions_exist(name):
    file, function = name.split()
    assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
