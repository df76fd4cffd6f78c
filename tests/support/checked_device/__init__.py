"""Checked device: a device in CPU memory that runs work late, in any legal order.

It checks the order of accesses. Tensors report the device type `checked`. All torch operations on
it, and the calls of its `DeviceRuntime`, arrive here: nothing in the product or in torch is patched
for them.
"""

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
