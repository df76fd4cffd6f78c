"""Clocks and memory figures of one device: the only module that may synchronise a device or its compute stream.

Times are device events: on a CPU values of `perf_counter`, on CUDA timed events on the current stream. They are read
after the step, so that measuring never makes the host wait for the device within a step.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias, cast

import psutil
import torch

DeviceEvent: TypeAlias = "float | torch.cuda.Event"


class DeviceError(ValueError):
    """A device that cannot be used; the message says which can."""


def compute_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device of that name, with an index if it is a GPU; None: a GPU if there is one, else the CPU.

    The index matters: plain "cuda" means the current device of the calling thread, which differs between threads.

    Raises:
        DeviceError: it is not a CPU or an existing CUDA device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as err:
        raise DeviceError(f'{device!r} is not a device name: use "cpu" or "cuda"') from err
    if resolved.type not in ("cpu", "cuda"):
        raise DeviceError(f'{resolved} is not supported: use "cpu" or "cuda" (ComfyUI: start it with --cpu)')
    count = torch.cuda.device_count() if resolved.type == "cuda" else 1
    if (resolved.index or 0) >= count:
        raise DeviceError(
            f'{resolved} does not exist, torch {torch.__version__} finds {count}: use "cpu" or another torch'
        )
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


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


class CudaClock:
    """Timed events on the stream that is current when `mark` is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> DeviceEvent:
        # A blocking event lets `wait_for` sleep instead of spinning on a core that the read threads need.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return float(cast(torch.cuda.Event, start).elapsed_time(cast(torch.cuda.Event, end))) / 1000.0

    def settle(self) -> None:
        if torch.cuda.is_initialized():  # otherwise there is nothing to wait for, and CUDA should not be initialised
            torch.cuda.current_stream(self._device).synchronize()

    def wait_for(self, event: DeviceEvent) -> None:
        cast(torch.cuda.Event, event).synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of `device` (`cpu` or `cuda`)."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that torch can still allocate on `device`, its cached memory included; None on a CPU.

    A limit of the process (`set_per_process_memory_fraction`) is not taken into account.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def total_bytes(device: torch.device) -> tuple[int | None, int]:
    """Return the total bytes of `device` (None on a CPU) and of the machine's RAM."""
    on_device = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return on_device, int(psutil.virtual_memory().total)


class MemoryMeter:
    """Memory figures of the process and one device; peaks count from the last `reset_peaks`. Never synchronises.

    The figures of a device are None on a CPU, whose memory is `rss_bytes`, and before this process has used CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def reset_peaks(self) -> None:
        if self._is_initialized():
            torch.cuda.reset_peak_memory_stats(self._device)

    def device_bytes(self) -> int | None:
        """Return the peak bytes that torch had allocated on the device since `reset_peaks`."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int | None:
        """Return the peak bytes that torch had reserved on the device since `reset_peaks`, in use or cached."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.max_memory_reserved(self._device))

    def allocated_bytes(self) -> int | None:
        """Return the bytes that torch has currently allocated on the device."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.memory_allocated(self._device))

    def used_bytes(self) -> int | None:
        """Return the bytes that all processes together currently use on the device."""
        if not self._is_initialized():
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def rss_bytes(self) -> int:
        """Return the bytes of RAM that this process currently uses, mapped files included."""
        return int(self._process.memory_info().rss)

    def _is_initialized(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_initialized()
