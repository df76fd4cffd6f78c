"""Measurement of runs: step events, memory samples, recorded timelines, traces."""

from __future__ import annotations

from .options import TelemetryOptions
from .phases import PhaseRegistry, QueueItemPhases
from .recorder import Recorder
from .step_events import BlockArrival, ReadSpan
from .trace import Ranges, ranged

__all__ = [
    "BlockArrival",
    "PhaseRegistry",
    "QueueItemPhases",
    "Ranges",
    "ReadSpan",
    "Recorder",
    "TelemetryOptions",
    "ranged",
]
