"""Measurement of runs: step events, memory samples, recorded timelines, traces."""

from __future__ import annotations

from .phases import PhaseRegistry, QueueItemPhases
from .recorder import Recorder, TelemetryOptions
from .step_events import BlockArrival, ReadSpan
from .trace import ranged

__all__ = [
    "BlockArrival",
    "PhaseRegistry",
    "QueueItemPhases",
    "ReadSpan",
    "Recorder",
    "TelemetryOptions",
    "ranged",
]
