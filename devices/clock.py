"""Clocks and memory figures of one device: the only module that may synchronise a device or its compute stream.

Times are device events: on a CPU values of `perf_counter`, elsewhere timed events on the current stream. They are read
after the step, so that measuring never makes the host wait for the device within a step.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias, cast

import psutil
import torch

from .registry import default_family, device_count, families, runtime_for
from .runtime import DeviceRuntime, Event

DeviceEvent: TypeAlias = "float | Event"


class DeviceError(ValueError):
    """A device that cannot be used; the message says which can."""


def compute_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device of that name, with an index unless it is a CPU; None: a GPU if there is one, else the CPU.

    The index matters: plain "cuda" means the current device of the calling thread, which differs between threads. A
    device without streams is used only by name.

    Raises:
        DeviceError: it is not a CPU or an existing device of a supported family.
    """
    if device is None:
        device = default_family()
    names = ", ".join(families())
    try:
        resolved = torch.device(device)
    except RuntimeError as err:
        raise DeviceError(f"{device!r} is not a device name: use cpu or one of {names}, such as cuda:1") from err
    if resolved.type == "cpu":
        if (resolved.index or 0) >= 1:
            raise DeviceError(f"{resolved} does not exist: use cpu")
        return resolved
    if resolved.type not in families():
        raise DeviceError(f"{resolved} is not supported: use cpu or one of {names} (ComfyUI: start it with --cpu)")
    runtime, count = families()[resolved.type], device_count(resolved.type)
    if count == 0:
        raise DeviceError(f"{resolved} does not exist: {(runtime or DeviceRuntime).unavailable()}")
    if (resolved.index or 0) >= count:
        last = f"{resolved.type}:{count - 1}"
        raise DeviceError(f"{resolved} does not exist, torch finds {count}: use a device up to {last}, or cpu")
    if resolved.index is not None:
        return resolved
    return torch.device(resolved.type, 0 if runtime is None else runtime.current_index())


class Clock(Protocol):
    """Time on one device."""

    def mark(self) -> DeviceEvent:
        """Record an event after all work issued to the device so far."""

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Return the seconds between two events; the device must have passed both (see `settle`)."""

    def settle(self) -> None:
        """Block the host until the device has passed all recorded events. Once per step, never per block."""

    def wait_for(self, event: DeviceEvent) -> None:
        """Block the host until the device has passed `event`, so that a cancel is not queued behind a whole step."""


class CpuClock:
    """Clock of a CPU, which computes synchronously: every event has passed when it is recorded."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return cast(float, end) - cast(float, start)

    def settle(self) -> None:
        return

    def wait_for(self, event: DeviceEvent) -> None:
        return


class SynchronousClock(CpuClock):
    """Clock of a device without streams: the host waits for all its work at every event, which has then passed."""

    def __init__(self, device: torch.device) -> None:
        self._family = device.type

    def mark(self) -> float:
        torch.get_device_module(self._family).synchronize()
        return time.perf_counter()


class StreamClock:
    """Timed events on the stream that is current when `mark` is called."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def mark(self) -> DeviceEvent:
        # A blocking event lets `wait_for` sleep instead of spinning on a core that the read threads need.
        event = self._runtime.event(timing=True, blocking=True)
        event.record(self._runtime.current_stream())
        return event

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return cast(Event, start).elapsed_time(cast(Event, end)) / 1000.0

    def settle(self) -> None:
        if self._runtime.is_initialized():  # otherwise there is nothing to wait for, and it should not be initialised
            self._runtime.current_stream().synchronize()

    def wait_for(self, event: DeviceEvent) -> None:
        cast(Event, event).synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of `device`."""
    runtime = runtime_for(device)
    if runtime is not None:
        return StreamClock(runtime)
    return CpuClock() if device.type == "cpu" else SynchronousClock(device)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that torch can still allocate on `device`, its cached memory included; None if that is RAM.

    ComfyUI counts in the same way. A limit of the process (`DeviceRuntime.limit_memory`) is not taken into account.
    """
    runtime = runtime_for(device)
    if runtime is None:
        return None
    return runtime.memory().free + runtime.reserved_bytes() - runtime.active_bytes()


def total_bytes(device: torch.device) -> tuple[int | None, int]:
    """Return the total bytes of `device` (None if it is RAM) and of the machine's RAM."""
    runtime = runtime_for(device)
    return None if runtime is None else runtime.memory().total, int(psutil.virtual_memory().total)


class MemoryMeter:
    """Memory figures of the process and one device; peaks count from the last `reset_peaks`. Never synchronises.

    The figures of a device are None if its memory is RAM, and before this process has used the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_for(device)
        self._process = psutil.Process()

    def reset_peaks(self) -> None:
        if (runtime := self._used()) is not None:
            runtime.reset_peaks()

    def device_bytes(self) -> int | None:
        """Return the peak bytes that torch had allocated on the device since `reset_peaks`."""
        return None if (runtime := self._used()) is None else runtime.allocated_bytes(peak=True)

    def reserved_bytes(self) -> int | None:
        """Return the peak bytes that torch had reserved on the device since `reset_peaks`, in use or cached."""
        return None if (runtime := self._used()) is None else runtime.reserved_bytes(peak=True)

    def allocated_bytes(self) -> int | None:
        """Return the bytes that torch has currently allocated on the device."""
        return None if (runtime := self._used()) is None else runtime.allocated_bytes()

    def used_bytes(self) -> int | None:
        """Return the bytes that all processes together currently use on the device."""
        if (runtime := self._used()) is None:
            return None
        memory = runtime.memory()
        return memory.total - memory.free

    def rss_bytes(self) -> int:
        """Return the bytes of RAM that this process currently uses, mapped files included."""
        return int(self._process.memory_info().rss)

    def _used(self) -> DeviceRuntime | None:
        """Return the runtime of the device, None if its memory is RAM and before its first use."""
        return self._runtime if self._runtime is not None and self._runtime.is_initialized() else None
