"""Memory figures for one device and the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psutil
import torch

from .registry import runtime_for
from .runtime import DeviceRuntime

T = TypeVar("T")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes torch can still allocate on `device`, including cached memory.

    None if that is RAM.

    ComfyUI counts in the same way. A process limit (`DeviceRuntime.limit_memory`) is not taken into
    account.
    """
    runtime = runtime_for(device)
    if runtime is None:
        return None
    # The driver counts torch's cache as used, but torch allocates from it first.
    return runtime.memory().free + runtime.reserved_bytes() - runtime.active_bytes()


def total_bytes(device: torch.device) -> tuple[int | None, int]:
    """Return the total bytes on `device` (None if it is RAM) and in the machine's RAM."""
    runtime = runtime_for(device)
    return None if runtime is None else runtime.memory().total, int(psutil.virtual_memory().total)


class MemoryMeter:
    """Memory figures for the process and one device. Peaks count from the last `reset_peaks`.

    Never synchronises.

    Device figures are None if the memory is RAM, and before this process has used the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_for(device)
        self._process = psutil.Process()

    def reset_peaks(self) -> None:
        self._of_device(lambda runtime: runtime.reset_peaks())

    def device_bytes(self) -> int | None:
        """Return torch's peak allocated bytes on the device since `reset_peaks`."""
        return self._of_device(lambda runtime: runtime.allocated_bytes(peak=True))

    def reserved_bytes(self) -> int | None:
        """Return torch's peak reserved bytes on the device since `reset_peaks`, used or cached."""
        return self._of_device(lambda runtime: runtime.reserved_bytes(peak=True))

    def allocated_bytes(self) -> int | None:
        """Return the bytes now allocated by torch on the device."""
        return self._of_device(lambda runtime: runtime.allocated_bytes())

    def used_bytes(self) -> int | None:
        """Return the bytes now used on the device by all processes together."""
        return self._of_device(lambda runtime: runtime.memory().used)

    def rss_bytes(self) -> int:
        """Return the RAM now used by this process in bytes, including mapped files."""
        return int(self._process.memory_info().rss)

    def _of_device(self, figure: Callable[[DeviceRuntime], T]) -> T | None:
        """Return a device figure. None if the memory is RAM, and before the first use."""
        if self._runtime is None or not self._runtime.is_initialized():
            return None
        return figure(self._runtime)
