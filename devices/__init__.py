"""Compute devices: clocks, memory figures, out-of-memory errors, the default compute dtype."""

from __future__ import annotations

from .available_ram import available_bytes, cgroup_limits, surely_lacks
from .clock import Clock, DeviceError, DeviceEvent, MemoryMeter, clock_for, compute_device, free_bytes, total_bytes
from .compute_dtype import AUTO, ComputeDtype, auto_dtype, common_dtype, dtype_name, in_own_dtype, resolved_dtype
from .oom import forget, is_out_of_memory

__all__ = [
    "AUTO",
    "Clock",
    "ComputeDtype",
    "DeviceError",
    "DeviceEvent",
    "MemoryMeter",
    "auto_dtype",
    "available_bytes",
    "cgroup_limits",
    "clock_for",
    "common_dtype",
    "compute_device",
    "dtype_name",
    "forget",
    "free_bytes",
    "in_own_dtype",
    "is_out_of_memory",
    "resolved_dtype",
    "surely_lacks",
    "total_bytes",
]
