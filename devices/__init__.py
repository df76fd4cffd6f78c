"""Compute devices: clocks, memory figures, out-of-memory errors, the default compute dtype."""

from __future__ import annotations

from .available_ram import available_bytes, cgroup_limits, insufficient_ram
from .clock import Clock, DeviceError, DeviceEvent, MemoryMeter, clock_for, compute_device, free_bytes, total_bytes
from .compute_dtype import AUTO, ComputeDtype, auto_dtype, common_dtype, dtype_name, resolve_dtype, with_resolved_dtype
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
    "insufficient_ram",
    "is_out_of_memory",
    "resolve_dtype",
    "total_bytes",
    "with_resolved_dtype",
]
