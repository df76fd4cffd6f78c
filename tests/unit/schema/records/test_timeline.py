from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from wanstream.schema.records import MemorySample, PhaseRecord, StepRecord, Timeline
from wanstream.schema.records.timeline import RateRange

TIMELINE = Timeline(
    kind="measured",
    steps=(
        StepRecord.of(
            index=0,
            expert="high",
            sigma=1.0,
            wall_s=2.0,
            compute_s=1.5,
            stall_s=0.5,
            bytes_moved=100,
        ),
        StepRecord.of(
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
            start_s=2.25,
            stall_on_read_s=0.0,
            copy_s=0.5,
            copied_bytes=50,
            read_s=0.25,
            reserved_bytes=8,
            device_used_bytes=12,
            dynamic_bytes=3,
            pinned_bytes=4,
        ),
    ),
    non_block_bytes=11,
    first_block_s=0.25,
    changes=("step 1: 2 buffers instead of 4, the device was out of memory",),
    phases=(
        PhaseRecord(name="text", start_s=-3.0, wall_s=2.0, rss_bytes=9),
        PhaseRecord(name="high", start_s=0, wall_s=2),
    ),
    memory=(MemorySample(at_s=0.5, device_bytes=7, device_used_bytes=None, rss_bytes=9),),
    copy_rates=(RateRange(from_gb_per_s=1, fetches=2, nbytes=30, busy_s=0.5),),
    read_rates=(RateRange(from_gb_per_s=0, fetches=1, nbytes=3, busy_s=0.25),),
)


def record(**figures: Any) -> StepRecord:
    usual = {
        "index": 0,
        "expert": "high",
        "sigma": None,
        "wall_s": 4.0,
        "compute_s": 3.0,
        "stall_s": 1.0,
    }
    return StepRecord.of(**{**usual, "bytes_moved": 100, **figures})


def test_sums_over_the_steps() -> None:
    assert (TIMELINE.wall_s, TIMELINE.compute_s, TIMELINE.stall_s, TIMELINE.bytes_moved) == (
        3.0,
        2.5,
        0.5,
        150,
    )
    assert (TIMELINE.decode_s, TIMELINE.transfers.read_bytes) == (0.125, 40)


def test_a_run_without_steps_took_nothing() -> None:
    empty = Timeline(steps=(), kind="simulated")
    assert (empty.wall_s, empty.transfers.overlap, empty.switch_step) == (0, None, None)


@pytest.mark.parametrize(
    ("figures", "overlap"),
    [
        ({}, None),
        ({"copy_s": 4.0}, 0.75),
        ({"read_s": 4.0}, 0.75),
        ({"copy_s": 2.0, "read_s": 5.0}, 0.8),  # side by side: the busier route counts
        ({"copy_s": 1.0}, 0.0),
        ({"copy_s": 0.5}, 0.0),  # waiting for decoding too
        ({"copy_s": 3.0, "stall_s": 0.0}, 1.0),
    ],
)
def test_the_share_of_the_transfers_that_computing_hid(
    figures: dict[str, float], overlap: float | None
) -> None:
    step = record(**figures)
    assert step.transfers.overlap == overlap
    assert Timeline(steps=(step, step), kind="measured").transfers.overlap == overlap


def test_rates_are_those_of_busy_routes() -> None:
    step = record(bytes_moved=100, copied_bytes=60, copy_s=2.0, read_bytes=90, read_s=3.0)
    assert (step.transfers.copy_bytes_per_s, step.transfers.read_bytes_per_s) == (30.0, 30.0)
    timeline = Timeline(steps=(step, record()), kind="measured")
    assert (timeline.transfers.copy_bytes_per_s, timeline.transfers.read_bytes_per_s) == (
        30.0,
        30.0,
    )
    assert (record().transfers.copy_bytes_per_s, record().transfers.read_bytes_per_s) == (
        None,
        None,
    )
    sums = (
        timeline.transfers.copy_s,
        timeline.transfers.copied_bytes,
        timeline.transfers.read_s,
        timeline.bytes_moved,
    )
    assert sums == (2.0, 60, 3.0, 200)


@pytest.mark.parametrize(
    ("experts", "switch"),
    [
        (["high", "high", "low"], 2),
        (["high"], None),
        (["low", "low"], None),
        (["high", "low", "high"], 1),
    ],
)
def test_the_switch_is_the_first_step_of_another_expert(
    experts: list[str], switch: int | None
) -> None:
    steps = tuple(record(index=index, expert=expert) for index, expert in enumerate(experts))
    assert Timeline(steps=steps, kind="measured").switch_step == switch
    later = tuple(replace(step, index=step.index + 5) for step in steps)
    assert Timeline(steps=later, kind="measured").switch_step == (
        None if switch is None else switch + 5
    )


def test_it_survives_json() -> None:
    assert Timeline.from_dict(json.loads(json.dumps(TIMELINE.to_dict()))) == TIMELINE


def test_json_has_lists_and_no_tuples() -> None:
    written = TIMELINE.to_dict()
    assert json.loads(json.dumps(written)) == written


def test_a_timeline_that_was_written_before_there_were_reads_and_changes_is_read() -> None:
    written = TIMELINE.to_dict()
    for name in ("changes", "phases", "memory", "copy_rates", "read_rates"):
        del written[name]
    old = {
        "index",
        "expert",
        "sigma",
        "wall_s",
        "compute_s",
        "stall_s",
        "bytes_moved",
        "device_bytes",
        "rss_bytes",
    }
    written["steps"] = [{name: step[name] for name in old} for step in written["steps"]]
    found = Timeline.from_dict(written)
    assert (found.changes, found.decode_s, found.transfers.read_bytes) == ((), 0, 0)
    assert (found.wall_s, found.bytes_moved, found.first_block_s) == (3.0, 150, 0.25)
    assert (found.phases, found.memory, found.steps[1].start_s) == ((), (), None)
    assert (found.copy_rates, found.read_rates) == ((), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guessed"}, "kind is 'guessed'"),
        ({"kind": None}, "kind is None"),
        ({"colour": "red"}, "colour"),
        ({"steps": [{"index": 0}]}, "missing .*expert"),
        ({"steps": 3}, "not iterable"),
        ({"phases": [{"name": "high"}]}, "missing .*start_s"),
        ({"memory": [{"at_s": 1, "colour": "red"}]}, "colour"),
        ({"copy_rates": [{"fetches": 1}]}, "missing .*from_gb_per_s"),
        ({"read_rates": 3}, "not iterable"),
        ({"changes": 3}, "not iterable"),
        ({"changes": "fewer buffers"}, "changes is 'fewer buffers', not a list of lines"),
        ({"changes": [1]}, "not a list of lines"),
    ],
)
def test_anything_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"not a timeline: .*{message}"):
        Timeline.from_dict({**TIMELINE.to_dict(), **change})
