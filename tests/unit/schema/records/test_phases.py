"""A run's phases follow each other without gaps and have the right names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from wanstream.schema.records import PHASES, StepRecord
from wanstream.schema.records.timeline import run_phases


def steps(
    *experts: str, wall_s: float = 2.0, gap_s: float = 0.5, **figures: Any
) -> list[StepRecord]:
    """Return 2 s steps with 0.5 s between them, the first after 1 s."""
    return [
        StepRecord.of(
            index=index,
            expert=expert,
            sigma=None,
            wall_s=wall_s,
            compute_s=1.0,
            stall_s=0.5,
            bytes_moved=1,
            start_s=1.0 + index * (wall_s + gap_s),
            **{name: values[index] for name, values in figures.items()},
        )
        for index, expert in enumerate(experts)
    ]


def test_a_run_of_both_experts() -> None:
    run = steps("high", "high", "low", "low")
    phases = run_phases(run, [1.5, 4.0, 7.25, 9.0])
    assert [(phase.name, phase.start_s, phase.wall_s) for phase in phases] == [
        ("first block", 0.0, 1.5),
        ("high", 1.5, 4.0),
        ("switch", 5.5, 1.75),
        ("low", 7.25, 3.25),
    ]
    assert {phase.name for phase in phases} < set(PHASES)
    for before, phase in pairwise(phases):
        assert phase.start_s == before.start_s + before.wall_s
    last = run[-1]
    assert last.start_s is not None
    assert sum(phase.wall_s for phase in phases) == last.start_s + last.wall_s


@pytest.mark.parametrize("expert", ["high", "low"])
def test_one_expert_has_no_switch(expert: str) -> None:
    assert [phase.name for phase in run_phases(steps(expert, expert), [1.5, 4.0])] == [
        "first block",
        expert,
    ]


def test_every_change_of_expert_is_a_switch() -> None:
    phases = run_phases(steps("high", "low", "high"), [1.5, 4.0, 6.5])
    assert [phase.name for phase in phases] == [
        "first block",
        "high",
        "switch",
        "low",
        "switch",
        "high",
    ]


def test_memory_is_the_most_of_a_stage_and_ram_its_last() -> None:
    run = steps(
        "high",
        "high",
        "low",
        device_bytes=[5, 3, 4],
        device_used_bytes=[None, 7, None],
        rss_bytes=[9, 8, 7],
    )
    high, low = run_phases(run, [1.0, 3.5, 6.0])[1::2]
    assert (high.device_bytes, high.device_used_bytes, high.rss_bytes) == (5, 7, 8)
    assert (low.device_bytes, low.device_used_bytes, low.rss_bytes) == (4, None, 7)


def test_a_step_without_blocks_computes_from_its_start() -> None:
    assert run_phases(steps("high"), [None])[0].wall_s == 1.0


def test_without_steps_or_their_times_there_are_no_phases() -> None:
    timeless = StepRecord.of(
        index=0, expert="high", sigma=None, wall_s=1, compute_s=1, stall_s=0, bytes_moved=0
    )
    assert run_phases([], []) == ()
    assert run_phases([timeless], [0.0]) == ()
