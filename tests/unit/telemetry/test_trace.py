"""Run traces: the format needed by viewers, and files either complete or absent."""

import json
from dataclasses import replace
from itertools import groupby
from unittest import mock

import pytest

from wanstream.devices import NvtxRanges
from wanstream.schema.records import MemorySample, PhaseRecord, StepRecord, Timeline
from wanstream.telemetry.trace import ROWS, TraceSpan, chrome_trace, ranged, write_trace
from wanstream.tests.support.full_disk import largest_file

TIMES = {"wall_s": 2.0, "compute_s": 1.5, "stall_s": 0.5, "start_s": 1.0}
STEP = StepRecord.of(index=3, expert="low", sigma=0.5, bytes_moved=100, read_bytes=40, **TIMES)
TEXT = PhaseRecord(name="text", start_s=-2.0, wall_s=1.0)
LOW = PhaseRecord(name="low", start_s=1.0, wall_s=2.0)
MEMORY = MemorySample(at_s=0.5, device_bytes=None, device_used_bytes=None, rss_bytes=9)
TIMELINE = Timeline(kind="measured", steps=(STEP,), phases=(TEXT, LOW), memory=(MEMORY,))


def span(row, began, ended, **args):
    return TraceSpan(row, f"low {began:g}", began, ended, args)


def slices(trace):
    """Return the complete events by row name."""
    events = sorted(trace["traceEvents"], key=lambda event: event.get("tid", 0))
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    whole = (event for event in events if event["ph"] == "X")
    return {names[tid]: [*group] for tid, group in groupby(whole, lambda event: event["tid"])}


def test_every_event_has_what_viewers_ask_for():
    trace = json.loads(json.dumps(chrome_trace(TIMELINE, [span("copy", 1.0, 1.5, bytes=7)])))
    assert trace["displayTimeUnit"] == "ms"
    needed = {"X": {"ts", "dur", "tid", "cat"}, "M": {"tid"}, "C": {"ts"}}
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "name", "args", *needed[event["ph"]]} <= event.keys()
    (copy,) = slices(trace)["copy"]
    assert (copy["ts"], copy["dur"], copy["args"]) == (1e6, 0.5e6, {"bytes": 7})


def test_rows_that_hold_something_are_named_and_in_order():
    rows = slices(chrome_trace(TIMELINE, [span(row, 1.0, 2.0) for row in reversed(ROWS)]))
    assert list(rows) == list(ROWS)
    assert list(slices(chrome_trace(TIMELINE))) == ["phases", "steps"]


def test_steps_phases_and_known_memory_are_those_of_the_timeline():
    for kind in ("measured", "simulated"):
        trace = chrome_trace(replace(TIMELINE, kind=kind))
        rows = slices(trace)
        phases = [(event["name"], event["ts"]) for event in rows["phases"]]
        assert phases == [("text", -2e6), ("low", 1e6)]
        (step,) = rows["steps"]
        assert (step["name"], step["ts"], step["dur"]) == ("low 3", 1e6, 2e6)
        assert step["args"] == {"sigma": 0.5, "bytes_moved": 100, "read_bytes": 40}
        (counter,) = (event for event in trace["traceEvents"] if event["ph"] == "C")
        assert (counter["ts"], counter["args"]) == (0.5e6, {"RAM": 9})


def test_spans_of_a_row_are_side_by_side():
    """A viewer shows overlapping slices in one thread as nested ones."""
    given = [span("copy", 2.0, 3.0), span("copy", 1.0, 2.000004), span("copy", 1.2, 1.3)]
    events = slices(chrome_trace(Timeline(steps=(), kind="measured"), given))["copy"]
    reached = 0.0
    for event in events:
        assert event["ts"] >= reached
        assert event["dur"] >= 0
        reached = event["ts"] + event["dur"]
    assert reached == 3e6


def test_every_trace_has_a_file_of_its_own(tmp_path):
    folder = tmp_path / "a" / "b"
    paths = {write_trace(folder, {"traceEvents": []}) for _ in range(3)}
    assert len(paths) == 3
    assert set(folder.iterdir()) == paths
    assert all(json.loads(path.read_text())["traceEvents"] == [] for path in paths)


def test_trace_has_the_number_of_its_steps_if_some_are_missing():
    two = Timeline(kind="measured", steps=(STEP, STEP))
    words = {"visits and fetches": "of the first 1 of 2 steps"}
    for given, expected in (({"traced_steps": 1}, words), ({"traced_steps": 2}, None), ({}, None)):
        assert chrome_trace(two, **given).get("otherData") == expected


def test_full_disk_leaves_no_unfinished_file(tmp_path):
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        write_trace(tmp_path, {"traceEvents": ["x" * 1000]})
    assert [*tmp_path.iterdir()] == []


def test_range_ends_with_its_block_whatever_happens():
    ranges = mock.create_autospec(NvtxRanges, instance=True)
    ranges.start.side_effect = (1, 2)
    with ranged(ranges, "a"):
        ranges.end.assert_not_called()
    with pytest.raises(OSError, match="gone"), ranged(ranges, "b"):
        raise OSError("gone")
    calls = [mock.call.start("a"), mock.call.end(1), mock.call.start("b"), mock.call.end(2)]
    assert ranges.mock_calls == calls
    with ranged(None, "c"):
        pass
