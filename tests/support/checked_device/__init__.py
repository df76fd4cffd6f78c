"""Checked device: a device of CPU memory that runs work late, in any legal order.

It checks the order of accesses. Tensors report the device type `checked`. All of torch's operations
on it, and the calls of its `DeviceRuntime`, arrive here: nothing of the product or of torch is
patched for them.
"""

from __future__ import annotations

from .machine import HostWait, Issued, Machine, StreamWait, TraceEntry
from .replay import races
from .runtime import CheckedRuntime, checked_machine

__all__ = [
    "CheckedRuntime",
    "HostWait",
    "Issued",
    "Machine",
    "StreamWait",
    "TraceEntry",
    "checked_machine",
    "races",
]
