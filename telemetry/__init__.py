"""Measurement of runs: step events, memory samples, recorded timelines, traces."""

from __future__ import annotations

from .nvtx import Ranges, ranged
from .options import Observe
from .phases import Ledger, Ledgers
from .read_timing import ReadMeter, ReadSpan
from .recorder import Recorder
from .step_events import BlockArrival

__all__ = [
    "BlockArrival",
    "Ledger",
    "Ledgers",
    "Observe",
    "Ranges",
    "ReadMeter",
    "ReadSpan",
    "Recorder",
    "ranged",
]
