"""L1: observes. Never decides."""

from __future__ import annotations

from .device import Clock, Mark, clock_for
from .timeline import Recorder

__all__ = ["Clock", "Mark", "Recorder", "clock_for"]
