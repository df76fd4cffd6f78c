"""Decoding in one pass on a card: torch's bits in every form, in one launch and without memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from wanstream.offload.formats import decode_tensor, one_pass
from wanstream.offload.formats.one_pass import same_bits, sample, unavailable
from wanstream.offload.formats.packing import QUANT_FORMATS, Constants
from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.offload.stored_forms import FORMS


@pytest.fixture
def device(gpu: Accelerator) -> torch.device:
    gpu.need_kernels("Triton's")
    assert unavailable(gpu.device) is None
    return gpu.device


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_bits_are_those_of_torch(gpu, device, form, monkeypatch, caplog):
    stored, shape, scale = sample(form)
    stored = stored.to(device)
    constants = Constants()
    how = {"packing": form.packing, "scale": None if scale is None else scale.to(device)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        expected, found = (torch.full(shape, 7, dtype=dtype, device=device) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(one_pass, "FAMILIES", ())
            decode_tensor(stored, expected, **how)
        decode_tensor(stored, found, **how, constants=constants)
        assert same_bits(found, expected).all()
        gpu.runtime.reset_peaks()
        before = gpu.runtime.allocated_bytes()
        decode_tensor(stored, found, **how, constants=constants)
        assert gpu.runtime.allocated_bytes(peak=True) == before
    assert not caplog.records, "a kernel was refused"


def test_a_tensor_takes_one_launch(device):
    calls = []
    constants = Constants()
    for form in FORMS:
        stored, shape, scale = sample(form)
        into = torch.empty(shape, dtype=torch.bfloat16, device=device)
        how = {"packing": form.packing, "scale": None if scale is None else scale.to(device)}
        calls.append((stored.to(device), into, how))

    def decode() -> None:
        for stored, into, how in calls:
            decode_tensor(stored, into, **how, constants=constants)

    decode()  # kernels are compiled and tested on their first use
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        decode()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
    expected = {"groups_k": len(QUANT_FORMATS), "microscaled_k": 3, "rotated_k": 4}
    assert {name: sum(name in each for each in names) for name in expected} == expected
    assert len([name for name in names if "Sync" not in name]) == len(FORMS), names


def test_offsets_of_more_than_32_bits(gpu, device):
    packing = QUANT_FORMATS["Q8_0"]
    count = 2**26 + 3
    if gpu.runtime.memory().free < 8e9:
        pytest.skip("needs 8 GB of device memory")
    groups = torch.zeros(count, packing.nbytes, dtype=torch.uint8, device=device)
    values = torch.empty(count, packing.values, dtype=torch.bfloat16, device=device)
    groups[-1] = torch.arange(1, 35)
    decode_tensor(groups, values, packing=packing)
    last = torch.empty(1, packing.values, dtype=torch.bfloat16)
    decode_tensor(groups[-1:].cpu(), last, packing=packing)
    assert torch.equal(values[-1:].cpu(), last)
    assert not values[:-1].any()
