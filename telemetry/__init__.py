"""Measurement of runs: step events, memory samples, recorded timelines, traces."""

from .merge import concatenate_timelines, merge_timelines, shift_step, shift_timeline
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
    "concatenate_timelines",
    "merge_timelines",
    "ranged",
    "shift_step",
    "shift_timeline",
]
