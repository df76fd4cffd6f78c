"""Measurement of runs: step events, memory samples, recorded timelines, traces."""

from __future__ import annotations

from .nvtx import Ranges, ranged
from .options import TelemetryOptions
from .phases import PhaseRegistry, QueueItemPhases
from .read_timing import ReadSpan
from .recorder import Recorder
from .step_events import BlockArrival

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
