from __future__ import annotations

import json
from typing import Any

import pytest

from wanstream.plan import StepRecord, Timeline

TIMELINE = Timeline(
    kind="measured",
    steps=(
        StepRecord(index=0, expert="high", sigma=1.0, wall_s=2.0, compute_s=1.5, stall_s=0.5, bytes_moved=100),
        StepRecord(
            index=1,
            expert="low",
            sigma=0.5,
            wall_s=1.0,
            compute_s=1.0,
            stall_s=0.0,
            bytes_moved=50,
            device_bytes=7,
            rss_bytes=9,
            decode_s=0.125,
            read_bytes=40,
        ),
    ),
    outer_bytes=11,
    first_block_s=0.25,
    changes=("step 1: 2 buffers instead of 4, the device was out of memory",),
)


def test_sums_over_the_steps() -> None:
    assert (TIMELINE.wall_s, TIMELINE.compute_s, TIMELINE.stall_s, TIMELINE.bytes_moved) == (3.0, 2.5, 0.5, 150)
    assert (TIMELINE.decode_s, TIMELINE.read_bytes) == (0.125, 40)


def test_a_run_without_steps_took_nothing() -> None:
    assert Timeline(steps=(), kind="simulated").wall_s == 0


def test_it_survives_json() -> None:
    assert Timeline.from_dict(json.loads(json.dumps(TIMELINE.to_dict()))) == TIMELINE


def test_json_has_lists_and_no_tuples() -> None:
    written = TIMELINE.to_dict()
    assert json.loads(json.dumps(written)) == written


def test_a_timeline_that_was_written_before_there_were_reads_and_changes_is_read() -> None:
    written = TIMELINE.to_dict()
    del written["changes"]
    for step in written["steps"]:
        del step["decode_s"], step["read_bytes"]
    found = Timeline.from_dict(written)
    assert (found.changes, found.decode_s, found.read_bytes) == ((), 0, 0)
    assert (found.wall_s, found.bytes_moved, found.first_block_s) == (3.0, 150, 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guessed"}, "kind is 'guessed'"),
        ({"kind": None}, "kind is None"),
        ({"colour": "red"}, "colour"),
        ({"steps": [{"index": 0}]}, "missing .*expert"),
        ({"steps": 3}, "not iterable"),
        ({"changes": 3}, "not iterable"),
        ({"changes": "fewer buffers"}, "changes is 'fewer buffers', not a list of lines"),
        ({"changes": [1]}, "not a list of lines"),
    ],
)
def test_anything_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"not a timeline: .*{message}"):
        Timeline.from_dict({**TIMELINE.to_dict(), **change})
