"""Clocks and memory of one device: the only file that may synchronise a device or its compute stream.

A *mark* is a point on the device's own time line. On a CPU it is a `perf_counter` value; on CUDA an event recorded on
the current stream, read after the step so that measuring never makes the host wait for the device in between.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias, cast

import psutil
import torch

DeviceEvent: TypeAlias = "float | torch.cuda.Event"


class DeviceError(ValueError):
    """A device that cannot be computed on; the message says which can."""


def compute_device(device: torch.device | str) -> torch.device:
    """The device of that name; plain "cuda" is the calling thread's, and other threads would take it for another one.

    Raises DeviceError unless it is a CPU or a CUDA device that is there.
    """
    try:
        resolved = torch.device(device)
    except RuntimeError as err:
        raise DeviceError(f'{device!r} names no device: give "cpu" or "cuda"') from err
    if resolved.type not in ("cpu", "cuda"):
        raise DeviceError(f'{resolved} cannot be computed on: give "cpu" or "cuda" (ComfyUI: start it with --cpu)')
    count = torch.cuda.device_count() if resolved.type == "cuda" else 1
    if (resolved.index or 0) >= count:
        raise DeviceError(
            f'{resolved} is not there, torch {torch.__version__} finds {count}: give "cpu" or another torch'
        )
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


class Clock(Protocol):
    """Time on one device."""

    def mark(self) -> DeviceEvent:
        """A point after all work given to the device so far."""

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Seconds between two marks; both must have passed (see `settle`)."""

    def settle(self) -> None:
        """Wait on the host until every mark made so far has passed. Once per step, never per block."""

    def wait_for(self, mark: DeviceEvent) -> None:
        """Wait on the host until the device has passed `mark`, so that a cancel is not queued behind a whole step."""


class CpuClock:
    """The CPU computes while the host calls it: every mark has passed when it is made."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return cast(float, end) - cast(float, start)

    def settle(self) -> None:
        return

    def wait_for(self, mark: DeviceEvent) -> None:
        return


class CudaClock:
    """Timed events on the stream that is current when `mark` is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> DeviceEvent:
        # A blocking event lets `wait_for` sleep instead of spinning on a core that the readers need.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        return float(cast(torch.cuda.Event, start).elapsed_time(cast(torch.cuda.Event, end))) / 1000.0

    def settle(self) -> None:
        if torch.cuda.is_initialized():  # otherwise nothing was given to the device, and it is not started for that
            torch.cuda.current_stream(self._device).synchronize()

    def wait_for(self, mark: DeviceEvent) -> None:
        cast(torch.cuda.Event, mark).synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of `device` (`cpu` or `cuda`)."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that torch can still give out on `device`: what is free there, and what it keeps for later; None on a CPU.

    A limit of the process (`set_per_process_memory_fraction`) is not known here.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def total_bytes(device: torch.device) -> tuple[int | None, int]:
    """Bytes that `device` has, None on a CPU, and bytes of RAM that the machine has."""
    on_device = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return on_device, int(psutil.virtual_memory().total)


class MemoryMeter:
    """Memory of the process and of one device; peaks are those since the last `restart`. Never waits for the device.

    What is told of a device is None on a CPU, whose memory is `rss_bytes`, and before its process has used CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def reset_peaks(self) -> None:
        if self._is_initialized():
            torch.cuda.reset_peak_memory_stats(self._device)

    def device_bytes(self) -> int | None:
        """Peak bytes that torch allocated on the device since `restart`."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int | None:
        """Peak bytes that torch held on the device since `restart`, in use or kept for later."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.max_memory_reserved(self._device))

    def allocated_bytes(self) -> int | None:
        """Bytes that torch has allocated on the device now."""
        if not self._is_initialized():
            return None
        return int(torch.cuda.memory_allocated(self._device))

    def used_bytes(self) -> int | None:
        """Bytes that all processes together hold on the device now."""
        if not self._is_initialized():
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def rss_bytes(self) -> int:
        """Bytes of RAM this process holds now, mapped files included."""
        return int(self._process.memory_info().rss)

    def _is_initialized(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_initialized()
