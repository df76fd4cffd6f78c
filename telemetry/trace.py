"""Run traces: NVTX ranges for NVIDIA's profilers, and a file for Perfetto."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..devices import NvtxRanges
from ..devices.machine import write_whole
from ..schema.records import Timeline


@contextmanager
def ranged(ranges: NvtxRanges | None, name: str) -> Iterator[None]:
    """Put the `with` body into one range. Do nothing if `ranges` is None."""
    if ranges is None:
        yield
        return
    number = ranges.start(name)
    try:
        yield
    finally:
        ranges.end(number)


ROWS = ("phases", "steps", "compute", "wait", "decode", "copy", "lock", "read", "read straight")
"""Rows from top to bottom. In "wait" the device has no block. "read straight" reads from the file
into a buffer."""

MAX_SPANS = 200_000
"""Most spans for visits, fetches and reads: about 1000 steps with 40 blocks. Later steps have
none."""

_PROCESS = 1
_NUMBERS = itertools.count(1)


class TraceSpan(NamedTuple):
    """One span on one row, in seconds since the run start."""

    row: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


def chrome_trace(
    timeline: Timeline, spans: Iterable[TraceSpan] = (), *, traced_steps: int | None = None
) -> dict[str, Any]:
    """Return the JSON object in Trace Event Format.

    It has complete events, one thread per row, and memory as counters. Clock resolution makes spans
    on one row overlap, so overlaps are cut off. `traced_steps` is the number of steps covered by
    `spans`. None: all.
    """
    every = [*_phases(timeline), *_steps(timeline), *spans]
    names = [row for row in ROWS if any(span.row == row for span in every)]
    events = [_named("process_name", 0, name="WanStream")]
    for number, row in enumerate(names, 1):
        events += [
            _named("thread_name", number, name=row),
            _named("thread_sort_index", number, sort_index=number),
        ]
        events += _row(number, [span for span in every if span.row == row])
    trace: dict[str, Any] = {"traceEvents": [*events, *_memory(timeline)], "displayTimeUnit": "ms"}
    if traced_steps not in (None, len(timeline.steps)):
        covered = f"of the first {traced_steps} of {len(timeline.steps)} steps"
        trace["otherData"] = {"visits and fetches": covered}
    return trace


def write_trace(folder: Path, trace: Mapping[str, Any]) -> Path:
    """Write a trace to a new file in `folder` and return its path.

    The file is complete, or does not exist.

    Raises:
        OSError: the file cannot be written.
    """
    # Several runs may end in the same second.
    name = f"wanstream-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_NUMBERS)}.json"
    path = folder / name
    write_whole(path, json.dumps(trace).encode())
    return path


def _phases(timeline: Timeline) -> Iterator[TraceSpan]:
    for phase in timeline.phases:
        yield TraceSpan("phases", phase.name, phase.start_s, phase.start_s + phase.wall_s, {})


def _steps(timeline: Timeline) -> Iterator[TraceSpan]:
    for step in timeline.steps:
        if step.start_s is not None:
            args = {
                "sigma": step.sigma,
                "bytes_moved": step.bytes_moved,
                "read_bytes": step.transfers.read_bytes,
            }
            name = f"{step.expert} {step.index}"
            yield TraceSpan("steps", name, step.start_s, step.start_s + step.wall_s, args)


def _row(number: int, spans: Sequence[TraceSpan]) -> Iterator[dict[str, Any]]:
    end = float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        start = max(span.start_s, end)
        end = max(span.end_s, start)
        at = _microseconds(start)
        # The duration is computed from rounded times, so rounding makes no overlap.
        lasted = _microseconds(end) - at
        yield _event("X", span.name, span.args, tid=number, cat=span.row, ts=at, dur=lasted)


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for sample in timeline.memory:
        figures = {
            "RAM": sample.rss_bytes,
            "torch": sample.device_bytes,
            "device": sample.device_used_bytes,
        }
        args = {name: value for name, value in figures.items() if value is not None}
        yield _event("C", "bytes", args, ts=_microseconds(sample.at_s))


def _named(event: str, number: int, **args: Any) -> dict[str, Any]:
    return _event("M", event, args, tid=number)


def _event(kind: str, name: str, args: Mapping[str, Any], **figures: Any) -> dict[str, Any]:
    # In this format, X is a complete event, C a counter, and M metadata.
    return {"ph": kind, "pid": _PROCESS, "name": name, "args": dict(args), **figures}


def _microseconds(seconds: float) -> float:
    # Three digits are nanoseconds. More digits would only enlarge the file.
    return round(seconds * 1e6, 3)
