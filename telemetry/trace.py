"""A run as a trace that ui.perfetto.dev and chrome://tracing open: what each route did, and when."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..schema import Timeline

ROWS = ("phases", "steps", "compute", "wait", "decode", "copy", "read", "read straight")
"""From top to bottom. "wait" is time in which the device has no block, "read straight" goes from file to buffer."""

MAX_SPANS = 200_000
"""Of visits, fetches and reads; about 1000 steps of 40 blocks. Longer runs are traced from their beginning."""

_PROCESS = 1
_NUMBERS = itertools.count(1)


class TraceSpan(NamedTuple):
    """One stretch of time on one row, in seconds since the run began."""

    row: str
    name: str
    start_s: float
    ended_s: float
    args: Mapping[str, Any]


def chrome_trace(
    timeline: Timeline, spans: Iterable[TraceSpan] = (), *, traced_steps: int | None = None
) -> dict[str, Any]:
    """The Trace Event Format's JSON object: complete events, one thread per row, memory as counters.

    Spans of one row that overlap by the resolution of a clock are cut, so that they lie side by side. `traced_steps` is
    how many steps `spans` tell of; None: all.
    """
    every = [*_phases(timeline), *_steps(timeline), *spans]
    names = [row for row in ROWS if any(span.row == row for span in every)]
    events = [_named("process_name", 0, name="WanStream")]
    for number, row in enumerate(names, 1):
        events += [_named("thread_name", number, name=row), _named("thread_sort_index", number, sort_index=number)]
        events += _row(number, [span for span in every if span.row == row])
    trace = {"traceEvents": [*events, *_memory(timeline)], "displayTimeUnit": "ms"}
    if traced_steps is None or traced_steps == len(timeline.steps):
        return trace
    return {**trace, "otherData": {"visits and fetches": f"of the first {traced_steps} of {len(timeline.steps)} steps"}}


def write_trace(folder: Path, trace: Mapping[str, Any]) -> Path:
    """Write a trace to a file of its own in `folder`, whole or not at all. Raises OSError."""
    name = f"wanstream-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_NUMBERS)}.json"
    path, unfinished = folder / name, folder / (name + ".part")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_text(json.dumps(trace), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _phases(timeline: Timeline) -> Iterator[TraceSpan]:
    for phase in timeline.phases:
        yield TraceSpan("phases", phase.name, phase.start_s, phase.start_s + phase.wall_s, {})


def _steps(timeline: Timeline) -> Iterator[TraceSpan]:
    for step in timeline.steps:
        if step.start_s is not None:
            told = {"sigma": step.sigma, "bytes_moved": step.bytes_moved, "read_bytes": step.read_bytes}
            yield TraceSpan("steps", f"{step.expert} {step.index}", step.start_s, step.start_s + step.wall_s, told)


def _row(number: int, spans: Sequence[TraceSpan]) -> Iterator[dict[str, Any]]:
    reached = float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        began = max(span.start_s, reached)
        reached = max(span.ended_s, began)
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": number,
            "name": span.name,
            "cat": span.row,
            "ts": _microseconds(began),
            "dur": _microseconds(reached) - _microseconds(began),
            "args": dict(span.args),
        }


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for sample in timeline.memory:
        figures = {"RAM": sample.rss_bytes, "torch": sample.device_bytes, "device": sample.device_used_bytes}
        told = {name: value for name, value in figures.items() if value is not None}
        yield {"ph": "C", "pid": _PROCESS, "name": "bytes", "ts": _microseconds(sample.at_s), "args": told}


def _named(event: str, number: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": number, "name": event, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
