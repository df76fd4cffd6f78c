"""L1: observes. Never decides."""

from __future__ import annotations

from .device import Clock, DeviceError, Mark, clock_for, compute_device, free_bytes
from .observe import Observe
from .timeline import Recorder

__all__ = ["Clock", "DeviceError", "Mark", "Observe", "Recorder", "clock_for", "compute_device", "free_bytes"]
