"""References to experts and workers, as sent in graphs, commands and messages."""

from __future__ import annotations

from .experts import Arithmetic, Attention, CodeFormat, ExpertsRef, KernelSet, LoraRef, Storage
from .workers import (
    GOALS,
    IN_PROCESS,
    LOCAL,
    ON_DEVICE,
    SHARDED,
    WEIGHT_PLACEMENTS,
    WHOLE_WEIGHTS,
    PathMap,
    WeightPlacement,
    WorkersError,
    WorkersRef,
    check_count,
    check_degrees,
    describe_workers,
    path_maps,
)

__all__ = [
    "GOALS",
    "IN_PROCESS",
    "LOCAL",
    "ON_DEVICE",
    "SHARDED",
    "WEIGHT_PLACEMENTS",
    "WHOLE_WEIGHTS",
    "Arithmetic",
    "Attention",
    "CodeFormat",
    "ExpertsRef",
    "KernelSet",
    "LoraRef",
    "PathMap",
    "Storage",
    "WeightPlacement",
    "WorkersError",
    "WorkersRef",
    "check_count",
    "check_degrees",
    "describe_workers",
    "path_maps",
]
