"""Compute devices: clocks, memory figures, out-of-memory errors, the default compute dtype."""

from __future__ import annotations

from .available_ram import available_bytes, cgroup_limits, insufficient_ram
from .cache_files import cache_folder, write_json
from .clock import Clock, DeviceError, DeviceEvent, MemoryMeter, clock_for, compute_device, free_bytes, total_bytes
from .compute_dtype import AUTO, ComputeDtype, auto_dtype, common_dtype, dtype_name, resolve_dtype
from .cpu_share import thread_notes
from .cuda import NvtxRanges
from .oom import LateDeviceError, forget, is_broken_device, is_out_of_memory, raise_late
from .registry import core_count, forked_random_state, gpu_count, made_current, register_runtime, runtime_for
from .runtime import DeviceMemory, DeviceRuntime, Event, NoPageLockError, PageLockError, Stream
from .shared_pages import PageLock

__all__ = [
    "AUTO",
    "Clock",
    "ComputeDtype",
    "DeviceError",
    "DeviceEvent",
    "DeviceMemory",
    "DeviceRuntime",
    "Event",
    "LateDeviceError",
    "MemoryMeter",
    "NoPageLockError",
    "NvtxRanges",
    "PageLock",
    "PageLockError",
    "Stream",
    "auto_dtype",
    "available_bytes",
    "cache_folder",
    "cgroup_limits",
    "clock_for",
    "common_dtype",
    "compute_device",
    "core_count",
    "dtype_name",
    "forget",
    "forked_random_state",
    "free_bytes",
    "gpu_count",
    "insufficient_ram",
    "is_broken_device",
    "is_out_of_memory",
    "made_current",
    "raise_late",
    "register_runtime",
    "resolve_dtype",
    "runtime_for",
    "thread_notes",
    "total_bytes",
    "write_json",
]
