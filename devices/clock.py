"""Device clocks, in the only module that may synchronise a device or its compute stream.

Times are device events: on a CPU `perf_counter` values, elsewhere timed events on the current
stream. They are read after the step, so measuring never makes the host wait for the device within a
step.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias, cast

import torch

from .registry import FAMILIES, default_family, device_count, runtime_for
from .runtime import DeviceRuntime, Event

DeviceEvent: TypeAlias = "float | Event"


class DeviceError(ValueError):
    """Device that cannot be used. The message says which can."""


def compute_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device with that name, with an index unless it is a CPU.

    None: a GPU if there is one, else the CPU.

    The index matters: plain "cuda" means the calling thread's current device, which differs between
    threads. A device without streams is used only by name.

    Raises:
        DeviceError: it is not a CPU or an existing device in a supported family.
    """
    if device is None:
        device = default_family()
    names = ", ".join(FAMILIES)
    try:
        resolved = torch.device(device)
    except RuntimeError as err:
        raise DeviceError(
            f"{device!r} is not a device name: use cpu or one of {names}, such as cuda:1"
        ) from err
    if resolved.type == "cpu":
        if (resolved.index or 0) >= 1:
            raise DeviceError(f"{resolved} does not exist: use cpu")
        return resolved
    if resolved.type not in FAMILIES:
        raise DeviceError(
            f"{resolved} is not supported: use cpu or one of {names} (ComfyUI: start it with --cpu)"
        )
    runtime = FAMILIES[resolved.type]
    count = device_count(resolved.type)
    if count == 0:
        reason = f"{runtime.unavailable()}, or" if runtime else "torch finds none:"
        raise DeviceError(f"{resolved} does not exist: {reason} use cpu")
    if (resolved.index or 0) >= count:
        last = f"{resolved.type}:{count - 1}"
        raise DeviceError(
            f"{resolved} does not exist, torch finds {count}: use a device up to {last}, or cpu"
        )
    if resolved.index is not None:
        return resolved
    return torch.device(resolved.type, 0 if runtime is None else runtime.current_index())


class Clock(Protocol):
    """Time on one device."""

    def mark(self) -> DeviceEvent:
        """Record an event after all work issued to the device so far."""

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Return the seconds between two events.

        The device must have passed both (see `settle`).
        """

    def settle(self) -> None:
        """Block the host until the device has passed all recorded events.

        Once per step, never per block.
        """

    def wait_for(self, event: DeviceEvent) -> None:
        """Block the host until the device has passed `event`.

        A cancel is then not queued behind a whole step.
        """


class CpuClock:
    """Clock for a CPU. It computes synchronously, so every event has passed when it is recorded."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return cast(float, end) - cast(float, start)

    def settle(self) -> None:
        return

    def wait_for(self, event: DeviceEvent) -> None:
        return


class SynchronousClock(CpuClock):
    """Clock for a device without streams.

    At every event the host waits for all device work, so the event has then passed.
    """

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
        # A blocking event lets `wait_for` sleep instead of spinning on a core needed by the read
        # threads.
        event = self._runtime.event(timing=True, blocking=True)
        event.record(self._runtime.current_stream())
        return event

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        # `elapsed_time` returns milliseconds.
        return cast(Event, start).elapsed_time(cast(Event, end)) / 1000.0

    def settle(self) -> None:
        # An unused device has nothing to wait for, and a synchronisation would initialise it.
        if self._runtime.is_initialized():
            self._runtime.current_stream().synchronize()

    def wait_for(self, event: DeviceEvent) -> None:
        cast(Event, event).synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock for `device`."""
    runtime = runtime_for(device)
    if runtime is not None:
        return StreamClock(runtime)
    if device.type == "cpu":
        return CpuClock()
    return SynchronousClock(device)
