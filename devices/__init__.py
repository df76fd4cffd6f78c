"""Compute devices: clocks, memory figures, out-of-memory errors, default compute dtype."""

from .clock import Clock, DeviceEvent, clock_for, compute_device
from .compute_dtype import AUTO, ComputeDtype, auto_dtype, common_dtype, dtype_name, resolve_dtype
from .cpu_share import thread_notes
from .cuda import NvtxRanges
from .memory import MemoryMeter, free_bytes, total_bytes
from .oom import LateDeviceError, forget, is_broken_device, is_out_of_memory, raise_late
from .registry import core_count, forked_random_state, gpu_count, made_current, runtime_for
from .runtime import DeviceRuntime, Event, NoPageLockError, PageLockError, Stream

__all__ = [
    "AUTO",
    "Clock",
    "ComputeDtype",
    "DeviceEvent",
    "DeviceRuntime",
    "Event",
    "LateDeviceError",
    "MemoryMeter",
    "NoPageLockError",
    "NvtxRanges",
    "PageLockError",
    "Stream",
    "auto_dtype",
    "clock_for",
    "common_dtype",
    "compute_device",
    "core_count",
    "dtype_name",
    "forget",
    "forked_random_state",
    "free_bytes",
    "gpu_count",
    "is_broken_device",
    "is_out_of_memory",
    "made_current",
    "raise_late",
    "resolve_dtype",
    "runtime_for",
    "thread_notes",
    "total_bytes",
]
