"""Runtimes by device type."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from .cuda import CudaRuntime
from .rocm import RocmRuntime
from .runtime import DeviceRuntime
from .shared_pages import LockedPages
from .xpu import XpuRuntime

_FAMILIES: dict[str, type[DeviceRuntime] | None] = {
    "cuda": CudaRuntime if torch.version.hip is None else RocmRuntime,
    "xpu": XpuRuntime,
    "mps": None,
}
"""Runtimes by device type; None for a family without streams, whose memory is RAM of the machine."""

_LOCKED_PAGES = {family: LockedPages() for family in _FAMILIES}
"""One list for each device type, created here: two threads may ask for the runtimes of two devices at once."""


def register_runtime(family: str, runtime: type[DeviceRuntime] | None) -> Callable[[], None]:
    """Use `runtime` for devices of the type `family`, and return a function that undoes it."""
    families_before = dict(_FAMILIES)
    pages_before = dict(_LOCKED_PAGES)
    _FAMILIES[family] = runtime
    _LOCKED_PAGES[family] = LockedPages()
    runtime_for.cache_clear()

    def restore() -> None:
        _FAMILIES.clear()
        _FAMILIES.update(families_before)
        _LOCKED_PAGES.clear()
        _LOCKED_PAGES.update(pages_before)
        runtime_for.cache_clear()

    return restore


def families() -> dict[str, type[DeviceRuntime] | None]:
    """Return the runtime class of every device type other than "cpu"; None for one without streams."""
    return dict(_FAMILIES)


def device_count(family: str) -> int:
    """Return the number of devices of a type."""
    runtime = _FAMILIES[family]
    return int(torch.get_device_module(family).device_count()) if runtime is None else runtime.count()


def default_family() -> str:
    """Return the type of the devices that are used by default: the first with streams and a device, else "cpu"."""
    return next((family for family, runtime in _FAMILIES.items() if runtime and runtime.count()), "cpu")


def gpu_count() -> int:
    """Return the number of GPUs for workers, which are "cuda" devices: torch.distributed connects them with NCCL."""
    return device_count("cuda")


def core_count() -> int:
    """Return the number of CPU cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on Windows and macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextmanager
def forked_random_state() -> Iterator[None]:
    """Restore torch's random states, of the CPU and of all devices with streams in use, after the `with`."""
    with ExitStack() as forked:
        forked.enter_context(torch.random.fork_rng(devices=()))
        for family, runtime in _FAMILIES.items():
            if runtime is not None and runtime.is_initialized():
                forked.enter_context(torch.random.fork_rng(devices=range(runtime.count()), device_type=family))
        yield


@functools.cache
def runtime_for(device: torch.device) -> DeviceRuntime | None:
    """Return the runtime of a device; None for a CPU and for types without streams."""
    runtime = _FAMILIES.get(device.type)
    return None if runtime is None else runtime(device, _LOCKED_PAGES[device.type])


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one inside the `with`: Triton launches on no other."""
    runtime = runtime_for(device)
    if runtime is None or runtime.current_index() == device.index:
        return nullcontext()
    return runtime.on_stream(runtime.current_stream())
