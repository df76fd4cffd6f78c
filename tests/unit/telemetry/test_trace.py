"""Run traces: the format needed by viewers, and files either complete or absent."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from wanstream.schema.records import MemorySample, PhaseRecord, StepRecord, Timeline
from wanstream.telemetry.trace import ROWS, TraceSpan, chrome_trace, write_trace

STEP = StepRecord.of(
    index=3,
    expert="low",
    sigma=0.5,
    wall_s=2.0,
    compute_s=1.5,
    stall_s=0.5,
    bytes_moved=100,
    read_bytes=40,
    start_s=1.0,
)
TIMELINE = Timeline(
    kind="measured",
    steps=(STEP,),
    phases=(
        PhaseRecord(name="text", start_s=-2.0, wall_s=1.0),
        PhaseRecord(name="low", start_s=1.0, wall_s=2.0),
    ),
    memory=(MemorySample(at_s=0.5, device_bytes=None, device_used_bytes=None, rss_bytes=9),),
)


def span(row: str, began: float, ended: float, **args: Any) -> TraceSpan:
    return TraceSpan(row, f"low {began:g}", began, ended, args)


def slices(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the complete events by row name."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = sorted(
        (event for event in trace["traceEvents"] if event["ph"] == "X"),
        key=lambda event: event["tid"],
    )
    return {
        names[tid]: list(group) for tid, group in groupby(found, key=lambda event: event["tid"])
    }


def test_every_event_has_what_viewers_ask_for() -> None:
    trace = json.loads(json.dumps(chrome_trace(TIMELINE, [span("copy", 1.0, 1.5, bytes=7)])))
    assert trace["displayTimeUnit"] == "ms"
    needed = {"X": {"ts", "dur", "tid", "cat"}, "M": {"tid"}, "C": {"ts"}}
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "name", "args", *needed[event["ph"]]} <= event.keys()
    (copy,) = slices(trace)["copy"]
    assert (copy["ts"], copy["dur"], copy["args"]) == (1e6, 0.5e6, {"bytes": 7})


def test_rows_that_hold_something_are_named_and_in_order() -> None:
    rows = slices(chrome_trace(TIMELINE, [span(row, 1.0, 2.0) for row in reversed(ROWS)]))
    assert list(rows) == list(ROWS)
    assert list(slices(chrome_trace(TIMELINE))) == ["phases", "steps"]


def test_steps_and_phases_are_those_of_the_timeline() -> None:
    rows = slices(chrome_trace(TIMELINE))
    assert [(event["name"], event["ts"]) for event in rows["phases"]] == [
        ("text", -2e6),
        ("low", 1e6),
    ]
    (step,) = rows["steps"]
    assert (step["name"], step["ts"], step["dur"]) == ("low 3", 1e6, 2e6)
    assert step["args"] == {"sigma": 0.5, "bytes_moved": 100, "read_bytes": 40}


def test_memory_is_a_counter_of_what_is_known() -> None:
    (counter,) = [event for event in chrome_trace(TIMELINE)["traceEvents"] if event["ph"] == "C"]
    assert (counter["ts"], counter["args"]) == (0.5e6, {"RAM": 9})


def test_spans_of_a_row_lie_side_by_side_even_where_clocks_are_coarse() -> None:
    """A viewer shows overlapping slices in one thread as nested ones."""
    given = [span("copy", 2.0, 3.0), span("copy", 1.0, 2.000004), span("copy", 1.2, 1.3)]
    events = slices(chrome_trace(Timeline(steps=(), kind="measured"), given))["copy"]
    reached = 0.0
    for event in events:
        assert event["ts"] >= reached
        assert event["dur"] >= 0
        reached = event["ts"] + event["dur"]
    assert reached == 3e6


def test_a_simulated_timeline_can_be_looked_at_too() -> None:
    assert "steps" in slices(chrome_trace(Timeline(steps=(STEP,), kind="simulated")))


def test_every_trace_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = {write_trace(tmp_path / "a" / "b", {"traceEvents": []}) for _ in range(3)}
    assert len(paths) == 3
    assert {
        json.loads(path.read_text(encoding="utf-8"))["traceEvents"] == [] for path in paths
    } == {True}
    assert set((tmp_path / "a" / "b").iterdir()) == paths


def test_a_trace_says_of_how_many_steps_it_tells() -> None:
    two = Timeline(kind="measured", steps=(STEP, STEP))
    assert chrome_trace(two, traced_steps=1)["otherData"] == {
        "visits and fetches": "of the first 1 of 2 steps"
    }
    assert "otherData" not in chrome_trace(two, traced_steps=2)
    assert "otherData" not in chrome_trace(two)


# A limit on file sizes simulates a full disk: the write fails with part of the file written.
WRITE_WITH_LITTLE_ROOM = """
import resource, sys
from pathlib import Path
from wanstream.telemetry.trace import write_trace

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_trace(Path(sys.argv[1]), {"traceEvents": ["x" * 1000]})
except OSError as err:
    print(err.errno)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.integration
def test_no_unfinished_file_is_left_on_a_full_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-c", WRITE_WITH_LITTLE_ROOM, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(said) == errno.EFBIG
    assert [*tmp_path.iterdir()] == []
