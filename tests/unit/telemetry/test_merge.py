"""Several workers' timelines become one, on the run's clock: nothing is lost or counted twice."""

from dataclasses import replace

import pytest

from wanstream.schema.records import MemorySample, PhaseRecord, RateRange, StepRecord, Timeline
from wanstream.telemetry import concatenate_timelines, merge_timelines, shift_timeline
from wanstream.tests.support.sampling.steps import changed_step


def step(index, *, wall_s=1.0, start_s=0.0, expert="high") -> StepRecord:
    sizes = {"bytes_moved": 100, "read_bytes": 50, "copied_bytes": 60, "rss_bytes": 1000 + index}
    times = {"wall_s": wall_s, "compute_s": wall_s / 2, "stall_s": wall_s / 4, "start_s": start_s}
    return StepRecord.of(index=index, expert=expert, sigma=1.0 - index / 10, **sizes, **times)


def timeline(*steps: StepRecord, **more: object) -> Timeline:
    return Timeline(kind="measured", steps=steps, **more)


MEMORY = MemorySample(at_s=0.5, device_bytes=None, device_used_bytes=None, rss_bytes=5)
HIGH = PhaseRecord(name="high", start_s=0.0, wall_s=1.0)


def test_timeline_of_one_task_stays_what_it_is():
    more = {"non_block_bytes": 7, "first_block_s": 0.1, "changes": ("smaller",), "phases": (HIGH,)}
    more["copy_rates"] = (RateRange(from_gb_per_s=1, fetches=2, nbytes=3, busy_s=0.4),)
    rich = timeline(step(0), step(1, start_s=1.0, expert="low"), memory=(MEMORY,), **more)
    assert concatenate_timelines([rich]) == rich
    assert merge_timelines([(0, rich)]) == rich
    lost = merge_timelines([(0, rich)], ["one lost"])
    assert lost == replace(rich, changes=("smaller", "one lost"))


def test_tasks_of_one_worker_follow_each_other():
    first = timeline(step(0), non_block_bytes=1, first_block_s=0.5, changes=("a",))
    more = {"non_block_bytes": 2, "first_block_s": 0.25, "changes": ("a", "b")}
    second = timeline(step(0), step(1, start_s=1.0), phases=(HIGH,), memory=(MEMORY,), **more)
    whole = concatenate_timelines([shift_timeline(first, 3.0), shift_timeline(second, 10.0)])
    assert [(each.index, each.start_s) for each in whole.steps] == [(0, 3.0), (0, 10.0), (1, 11.0)]
    assert (whole.non_block_bytes, whole.first_block_s, whole.changes) == (3, 3.5, ("a", "b"))
    assert (whole.phases[0].start_s, whole.memory[0].at_s) == (10.0, 10.5)
    assert whole.bytes_moved == first.bytes_moved + second.bytes_moved
    for first_block_s, shifted in ((0.0, 2.0), (None, None)):
        one = shift_timeline(timeline(step(0), first_block_s=first_block_s), 2.0)
        assert concatenate_timelines([one]).first_block_s == shifted
    assert shift_timeline(timeline(step(0, start_s=None)), 3.0).steps[0].start_s is None


def test_videos_in_turn_add_up_and_workers_side_by_side_do_not():
    """Row 0 takes two videos with 1 s per step, row 1 one with 1.5 s.

    The step took 2 s, and three times the bytes.
    """
    longer = shift_timeline(timeline(step(0, wall_s=1.5)), 0.5)
    again = shift_timeline(timeline(step(0)), 1.0)
    (only,) = merge_timelines([(0, timeline(step(0))), (1, longer), (0, again)]).steps
    assert (only.wall_s, only.compute_s, only.stall_s) == (2.0, 1.0, 0.5)
    moved = (only.bytes_moved, only.transfers.read_bytes, only.transfers.copied_bytes)
    assert moved == (300, 150, 180)
    assert (only.start_s, only.memory.rss_bytes, only.memory.device_bytes) == (0.0, 1000, None)


def test_stages_become_the_steps_of_one_run():
    high = timeline(step(0), step(1, start_s=1.0))
    low = timeline(step(2, expert="low"), step(3, expert="low"))
    later = [(0, shift_timeline(high, 2.0)), (0, shift_timeline(low, 4.0))]
    merged = merge_timelines([(0, high), *later])
    assert [each.index for each in merged.steps] == [0, 1, 2, 3]
    assert [each.wall_s for each in merged.steps] == [2.0, 2.0, 1.0, 1.0]
    assert merged.switch_step == 2


@pytest.mark.parametrize(
    ("known", "most"), [((None, 5), 5), ((5, None), 5), ((None, None), None), ((2, 3), 3)]
)
def test_most_of_the_known_values_counts(known, most):
    steps = [changed_step(step(0), device_bytes=each) for each in known]
    (only,) = merge_timelines([*enumerate(map(timeline, steps))]).steps
    assert only.memory.device_bytes == most
