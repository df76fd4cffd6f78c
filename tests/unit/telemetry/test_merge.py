"""Several workers' timelines become one, on the run's clock: nothing is lost or counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.schema.records import MemorySample, PhaseRecord, StepRecord, Timeline
from wanstream.schema.records.timeline import RateRange
from wanstream.telemetry import concatenate_timelines, merge_timelines, shift_timeline
from wanstream.tests.support.steps import changed_step


def step(
    index: int, *, wall_s: float = 1.0, start_s: float | None = 0.0, expert: str = "high"
) -> StepRecord:
    return StepRecord.of(
        index=index,
        expert=expert,
        sigma=1.0 - index / 10,
        wall_s=wall_s,
        compute_s=wall_s / 2,
        stall_s=wall_s / 4,
        bytes_moved=100,
        read_bytes=50,
        copied_bytes=60,
        rss_bytes=1000 + index,
        start_s=start_s,
    )


def timeline(*steps: StepRecord, **more: object) -> Timeline:
    return Timeline(kind="measured", steps=steps, **more)


def test_the_timeline_of_one_task_stays_what_it_is() -> None:
    rich = timeline(
        step(0),
        step(1, start_s=1.0, expert="low"),
        non_block_bytes=7,
        first_block_s=0.1,
        changes=("smaller",),
        phases=(PhaseRecord(name="high", start_s=0.0, wall_s=1.0),),
        memory=(MemorySample(at_s=0.5, device_bytes=None, device_used_bytes=None, rss_bytes=5),),
        copy_rates=(RateRange(from_gb_per_s=1, fetches=2, nbytes=3, busy_s=0.4),),
    )
    assert concatenate_timelines([rich]) == rich
    assert merge_timelines([(0, rich)]) == rich
    assert merge_timelines([(0, rich)], ["one lost"]) == replace(
        rich, changes=("smaller", "one lost")
    )


def test_tasks_of_one_worker_follow_each_other_in_the_time_of_the_run() -> None:
    first = timeline(step(0), non_block_bytes=1, first_block_s=0.5, changes=("a",))
    second = timeline(
        step(0),
        step(1, start_s=1.0),
        non_block_bytes=2,
        first_block_s=0.25,
        changes=("a", "b"),
        phases=(PhaseRecord(name="high", start_s=0.0, wall_s=2.0),),
        memory=(MemorySample(at_s=0.5, device_bytes=None, device_used_bytes=None, rss_bytes=5),),
    )
    whole = concatenate_timelines([shift_timeline(first, 3.0), shift_timeline(second, 10.0)])
    assert [(each.index, each.start_s) for each in whole.steps] == [(0, 3.0), (0, 10.0), (1, 11.0)]
    assert (whole.non_block_bytes, whole.first_block_s, whole.changes) == (3, 3.5, ("a", "b"))
    assert (whole.phases[0].start_s, whole.memory[0].at_s) == (10.0, 10.5)
    assert whole.bytes_moved == first.bytes_moved + second.bytes_moved


def test_a_first_block_at_once_is_a_first_block() -> None:
    assert (
        concatenate_timelines(
            [shift_timeline(timeline(step(0), first_block_s=0.0), 2.0)]
        ).first_block_s
        == 2.0
    )
    assert concatenate_timelines([shift_timeline(timeline(step(0)), 2.0)]).first_block_s is None


def test_videos_in_turn_add_up_and_workers_side_by_side_do_not() -> None:
    """Row 0 takes two videos with 1 s per step, row 1 one with 1.5 s.

    The step took 2 s, and three times the bytes.
    """
    merged = merge_timelines(
        [
            (0, timeline(step(0))),
            (1, shift_timeline(timeline(step(0, wall_s=1.5)), 0.5)),
            (0, shift_timeline(timeline(step(0)), 1.0)),
        ]
    )
    (only,) = merged.steps
    assert (only.wall_s, only.compute_s, only.stall_s) == (2.0, 1.0, 0.5)
    assert (only.bytes_moved, only.transfers.read_bytes, only.transfers.copied_bytes) == (
        300,
        150,
        180,
    )
    assert (only.start_s, only.memory.rss_bytes, only.memory.device_bytes) == (0.0, 1000, None)


def test_stages_become_the_steps_of_one_run() -> None:
    high, low = (
        timeline(step(0), step(1, start_s=1.0)),
        timeline(step(2, expert="low"), step(3, expert="low")),
    )
    merged = merge_timelines(
        [(0, high), (0, shift_timeline(high, 2.0)), (0, shift_timeline(low, 4.0))]
    )
    assert [each.index for each in merged.steps] == [0, 1, 2, 3]
    assert merged.switch_step == 2
    assert [each.wall_s for each in merged.steps] == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("known", [(None, 5), (5, None), (None, None), (2, 3)])
def test_what_is_not_known_of_all_is_told_as_far_as_it_is_known(
    known: tuple[int | None, int | None],
) -> None:
    parts = [
        (data, timeline(changed_step(step(0), device_bytes=each)))
        for data, each in enumerate(known)
    ]
    (only,) = merge_timelines(parts).steps
    told = [each for each in known if each is not None]
    assert only.memory.device_bytes == (max(told) if told else None)


def test_steps_that_have_no_beginning_keep_none() -> None:
    assert shift_timeline(timeline(step(0, start_s=None)), 3.0).steps[0].start_s is None
