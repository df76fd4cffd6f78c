"""Names of compute devices."""

from __future__ import annotations

import pytest
import torch

from wanstream.devices import DeviceError, compute_device


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_cpu_is_always_there(device: torch.device | str) -> None:
    assert compute_device(device) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "'gpu' is not a device name"),
        ("", "is not a device name"),
        ("meta", "meta is not supported"),
        ("mps", "mps is not supported"),
        (f"cuda:{torch.cuda.device_count()}", f"finds {torch.cuda.device_count()}: use"),
    ],
)
def test_others_are_refused_with_a_way_out(device: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        compute_device(device)
