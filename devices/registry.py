"""Runtimes by device type."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from .cuda import CudaRuntime, RocmRuntime
from .machine.shared_pages import LockedPages
from .runtime import DeviceRuntime
from .xpu import XpuRuntime

FAMILIES: dict[str, type[DeviceRuntime] | None] = {
    "cuda": CudaRuntime if torch.version.hip is None else RocmRuntime,
    "xpu": XpuRuntime,
    "mps": None,
}
"""Runtimes by device type other than "cpu". None for a family without streams, whose memory is the
machine's RAM."""

LOCKED_PAGES = {family: LockedPages() for family in FAMILIES}
"""One list per device type, created here because two threads may request runtimes for two devices
at once."""


def device_count(family: str) -> int:
    """Return the device count for a type."""
    runtime = FAMILIES[family]
    if runtime is None:
        return int(torch.get_device_module(family).device_count())
    return runtime.count()


def default_family() -> str:
    """Return the type of the default devices: the first with streams and a device, else "cpu"."""
    return next(
        (family for family, runtime in FAMILIES.items() if runtime and runtime.count()), "cpu"
    )


def gpu_count() -> int:
    """Return the number of GPUs for workers.

    They are "cuda" devices, because torch.distributed connects them with NCCL.
    """
    return device_count("cuda")


def core_count() -> int:
    """Return the number of CPU cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on Windows and macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextmanager
def forked_random_state() -> Iterator[None]:
    """Restore torch's random states after the `with`, for the CPU and used devices with streams."""
    with ExitStack() as forked:
        # By default, `fork_rng` includes all CUDA devices, and would initialise them.
        forked.enter_context(torch.random.fork_rng(devices=()))
        for family, runtime in FAMILIES.items():
            if runtime is not None and runtime.is_initialized():
                forked.enter_context(
                    torch.random.fork_rng(devices=range(runtime.count()), device_type=family)
                )
        yield


# Cached, because all callers must share a device's streams and page locks.
@functools.cache
def runtime_for(device: torch.device) -> DeviceRuntime | None:
    """Return the runtime for a device. None for a CPU and for types without streams."""
    runtime = FAMILIES.get(device.type)
    if runtime is None:
        return None
    return runtime(device, LOCKED_PAGES[device.type])


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current inside the `with`. Triton launches on no other device."""
    runtime = runtime_for(device)
    if runtime is None or runtime.current_index() == device.index:
        return nullcontext()
    # Entering a stream makes its device current, too.
    return runtime.on_stream(runtime.current_stream())
