"""Runtimes by device type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from .cuda import CudaRuntime
from .runtime import DeviceRuntime


class NoRuntimeError(ValueError):
    """A device family without a runtime."""


_FAMILIES: dict[str, type[DeviceRuntime]] = {"cuda": CudaRuntime}
"""Runtimes by device type; AMD GPUs with ROCm are "cuda" too."""


def register_runtime(family: str, runtime: type[DeviceRuntime]) -> Callable[[], None]:
    """Use `runtime` for devices of the type `family`, and return a function that undoes it."""
    before = _FAMILIES.get(family)
    _FAMILIES[family] = runtime
    runtime_for.cache_clear()

    def restore() -> None:
        if before is None:
            del _FAMILIES[family]
        else:
            _FAMILIES[family] = before
        runtime_for.cache_clear()

    return restore


def family_runtime(family: str) -> type[DeviceRuntime]:
    """Return the runtime class of a device type.

    Raises:
        NoRuntimeError: there is none.
    """
    if family not in _FAMILIES:
        raise NoRuntimeError(f"{family} is not supported")
    return _FAMILIES[family]


def default_family() -> str:
    """Return the type of the devices that are used by default: the first with a device, else "cpu"."""
    return next((family for family, runtime in _FAMILIES.items() if runtime.count()), "cpu")


def gpu_count() -> int:
    """Return the number of devices of the default family; 0 if that is the CPU."""
    family = default_family()
    return 0 if family == "cpu" else family_runtime(family).count()


@contextmanager
def forked_random_state() -> Iterator[None]:
    """Restore torch's random states, of the CPU and of all devices in use, after the `with`."""
    with ExitStack() as forked:
        forked.enter_context(torch.random.fork_rng(devices=()))
        for family, runtime in _FAMILIES.items():
            if runtime.is_initialized():
                forked.enter_context(torch.random.fork_rng(devices=range(runtime.count()), device_type=family))
        yield


@functools.cache
def runtime_for(device: torch.device) -> DeviceRuntime | None:
    """Return the runtime of a device; None for a CPU and for types without one, whose work is taken as synchronous."""
    family = _FAMILIES.get(device.type)
    return None if family is None else family(device)
