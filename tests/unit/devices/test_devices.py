"""Compute device names, reasons why one cannot be used, and the runtimes of the families."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wanstream.devices import compute_device, cuda, runtime_for
from wanstream.devices.clock import DeviceError
from wanstream.devices.cuda import CudaRuntime, RocmRuntime
from wanstream.devices.registry import FAMILIES, LOCKED_PAGES, default_family, device_count
from wanstream.devices.xpu import XpuRuntime

NO_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")
NO_XPU = pytest.mark.skipif(torch.xpu.device_count() > 0, reason="has an Intel GPU")
OTHERS = "use cpu or one of cuda, xpu, mps"


@pytest.fixture
def some_devices(monkeypatch) -> None:
    """One Apple device, and two CUDA devices."""
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(CudaRuntime, "count", lambda: 2)


@pytest.mark.usefixtures("some_devices")
@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), "mps:0", "cuda:1"])
def test_a_device_is_there_with_its_index(device):
    assert compute_device(device) == torch.device(device)
    assert compute_device("mps").index == 0


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", f"'gpu' is not a device name: {OTHERS}"),
        ("", "is not a device name"),
        ("cpu:1", "cpu:1 does not exist: use cpu"),
        ("meta", f"meta is not supported: {OTHERS}"),
        ("privateuseone:0", rf"is not supported: {OTHERS} \(ComfyUI: start it with --cpu\)"),
        pytest.param(
            "cuda:1", "built without CUDA: install torch for CUDA, or use cpu", marks=NO_CUDA
        ),
        pytest.param("xpu", "xpu does not exist: .* XPU", marks=NO_XPU),
    ],
)
def test_others_are_refused_with_a_way_out(device, message):
    with pytest.raises(DeviceError, match=message):
        compute_device(device)


@pytest.mark.usefixtures("some_devices")
@pytest.mark.parametrize(("device", "last"), [("mps:1", "mps:0"), ("cuda:2", "cuda:1")])
def test_an_index_out_of_range_is_refused_with_their_number(device, last):
    words = f"{device} does not exist, torch finds [12]: use a device up to {last}, or"
    with pytest.raises(DeviceError, match=words):
        compute_device(device)


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (None, "built for CUDA 12.8, and there is no NVIDIA driver"),
        ((11, 4), "12.8, and the NVIDIA driver supports CUDA up to 11.4: update the driver"),
        ((12, 2), r"\(CUDA up to 12.2\) gives torch no GPU, and CUDA_VISIBLE_DEVICES is '7': che"),
    ],
)
def test_a_driver_without_a_gpu_for_this_torch_is_named(driver, message, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    monkeypatch.setattr(CudaRuntime, "count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=message):
        compute_device("cuda")


@pytest.mark.usefixtures("some_devices")
def test_a_device_without_streams_is_used_only_by_name(monkeypatch):
    monkeypatch.setattr(CudaRuntime, "count", lambda: 0)
    assert default_family() != "mps"
    assert runtime_for(torch.device("mps", 0)) is None


@pytest.mark.parametrize("family", ["cuda", "xpu"])
def test_devices_of_one_type_share_their_locked_pages(family):
    one, other = (runtime_for(torch.device(family, index)) for index in range(2))
    assert one.shared_pages._pages is other.shared_pages._pages is LOCKED_PAGES[family]


@NO_XPU
def test_xpu_without_a_device():
    assert device_count("xpu") == XpuRuntime.count() == 0
    assert not XpuRuntime.is_initialized()


@pytest.mark.parametrize(("module", "blocking"), [(torch.cuda, True), (torch.xpu, False)])
def test_torch_has_the_functions_that_runtimes_call(module, blocking):
    """Not run on hardware: this compares names and parameters only."""
    for name in ("device_count", "is_available", "current_device", "is_initialized"):
        inspect.signature(getattr(module, name)).bind()
    device = torch.device(module.__name__.rpartition(".")[2], 0)
    for name in (
        *("Stream", "current_stream", "set_device", "get_device_name", "mem_get_info"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("get_device_properties", "reset_peak_memory_stats"),
    ):
        inspect.signature(getattr(module, name)).bind(device)
    inspect.signature(module.stream).bind(object())
    options = {"enable_timing": True} | ({"blocking": True} if blocking else {})
    inspect.signature(module.Event.__new__).bind(module.Event, **options)
    for method in ("record", "synchronize", "elapsed_time"):
        assert callable(getattr(module.Event, method))
    for method in ("wait_event", "wait_stream", "synchronize"):
        assert callable(getattr(module.Stream, method))


XPU = XpuRuntime(torch.device("xpu", 0))


@pytest.mark.parametrize(("reports", "free"), [(True, 3), (False, 7)])
def test_xpu_counts_its_own_memory_if_the_driver_does_not(reports, free, monkeypatch):
    def mem_get_info(device: torch.device) -> tuple[int, int]:
        if not reports:
            raise RuntimeError("The device doesn't support querying the available free memory")
        return 3, 9

    properties = SimpleNamespace(total_memory=9)
    monkeypatch.setattr(torch.xpu, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert XPU.memory() == (free, 9)


@pytest.mark.parametrize(("units", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_xpu_computes_in_bf16_only_with_units(units, dtype, monkeypatch):
    properties = SimpleNamespace(has_bfloat16_conversions=units)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert XPU.auto_dtype() == dtype


def test_rocm_is_cuda_with_its_own_words(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert RocmRuntime(torch.device("cuda", 0)).auto_dtype() == torch.bfloat16
    assert "built for ROCm 6.4 and finds no AMD GPU" in RocmRuntime.unavailable()
    assert RocmRuntime.host_register == "hipHostRegister"


IMPORT_AND_REFUSE = """
import torch
called = []
for family in ("cuda", "xpu", "mps"):
    module = getattr(torch, family)
    for name in "_lazy_init init device_count is_available current_device set_device".split():
        if hasattr(module, name):
            count = lambda *args, _name=name, **kwargs: called.append(_name) or 0
            setattr(module, name, count)
import wanstream.devices
assert not called, called
for family in ("cuda", "xpu", "mps"):
    try:
        wanstream.devices.compute_device(family)
    except ValueError:
        pass
assert set(called) <= {"device_count", "is_available"}, called
"""


@pytest.mark.slow
def test_importing_and_refusing_initialises_no_device():
    subprocess.run([sys.executable, "-c", IMPORT_AND_REFUSE], check=True)


def test_every_family_is_in_the_documentation():
    table = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert all(f"`{family}`" in table for family in FAMILIES)
