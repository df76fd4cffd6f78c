"""A step's figures from events.

On a CPU an event is a host time, so sums can be checked by hand.
"""

import torch

from wanstream.devices.clock import clock_for
from wanstream.schema.records import Transfers
from wanstream.telemetry.step_events import BlockArrival, ReadSpan, StepEvents

CLOCK = clock_for(torch.device("cpu"))


def arrival(block, asked=0, arrived=0, **spans):
    """Return an arrival, with spans for `read`, `copied` and `decoded`."""
    given = (spans.get(name) for name in ("read", "copied", "decoded"))
    return BlockArrival(block, 100, asked, arrived, *given)


def read(began, ended, *, straight=False, locked=None):
    return ReadSpan(began, ended, 60, straight, locked)


def marks(*arrivals, visits=()):
    step = StepEvents(CLOCK)
    step.arrivals += arrivals
    step.visits += visits
    return step


def test_visits_give_stall_and_computing():
    step = marks(visits=((0, 10.0, 11.0, 11.5, 13.0), (1, 13.0, 13.25, 13.25, 15.25)))
    assert (step.transfers(16.0, 16.0).stall_s, step.compute_s()) == (1.25, 3.5)
    assert step.computed_from(end=16.0, now=16.0, run_start=0.0) == 11.5


def test_empty_step_has_nothing():
    step = marks()
    assert step.transfers(1, 1) == Transfers(stall_s=0, bytes_moved=0)
    assert (step.compute_s(), step.decode_s(), step.copies, step.read_shares) == (0, 0, [], [])
    assert step.computed_from(1, 1, 0.0) is None


def test_only_copied_blocks_count_as_copied():
    step = marks(arrival(0, copied=(1.0, 3.0)), arrival(1, decoded=(4.0, 5.0)), arrival(2))
    assert step.transfers(9, 9).bytes_moved == 300
    assert (step.copies, step.decode_s()) == ([(100, 2.0)], 1.0)


def test_reading_is_busy_while_at_least_one_read_goes_on():
    for spans, busy in (
        ([(3, 4), (1, 2)], 2),
        ([(1, 4), (2, 3)], 3),  # two threads: one read inside the other
        ([(1, 3), (2, 5)], 4),
        ([(1, 3), (3, 5)], 4),
    ):
        step = marks(*(arrival(block, read=read(*span)) for block, span in enumerate(spans)))
        assert step.transfers(9, 9).read_s == busy, spans


def test_stall_is_the_files_until_its_reading_has_ended():
    for ended, stall_s in ((9.0, 0.0), (10.0, 0.0), (10.5, 0.5), (12.0, 2.0), (14.0, 2.0)):
        step = marks(arrival(0, 10.0, 12.0, read=read(1.0, ended)), arrival(1, 20.0, 23.0))
        assert step.transfers(end=30.0, now=30.0).stall_on_read_s == stall_s


def test_device_times_are_aligned_at_the_end_of_the_step():
    """A device whose time line starts elsewhere: 1000 s ahead of the host's."""
    visit = (0, 1010.0, 1012.0, 1012.0, 1013.0)
    step = marks(arrival(0, 1010.0, 1012.0, read=read(1.0, 11.0)), visits=(visit,))
    assert step.transfers(end=1020.0, now=20.0).stall_on_read_s == 1.0
    assert step.computed_from(end=1020.0, now=20.0, run_start=0.0) == 12.0


def test_rows_of_a_trace():
    copied = read(8.0, 9.0, locked=(9.0, 9.25))
    step = marks(
        arrival(3, 10.0, 11.0, read=copied, copied=(9.0, 9.5), decoded=(9.5, 11.0)),
        arrival(4, 12.0, 12.0, read=read(8.5, 9.0, straight=True)),
        visits=((3, 10.0, 11.0, 11.0, 12.0), (4, 12.0, 12.0, 12.0, 13.0)),
    )
    spans = step.spans("low", 13.0, 13.0, run_start=7.0)
    assert {(span.row, span.name): (span.start_s, span.end_s) for span in spans} == {
        ("wait", "low 3"): (3, 4),
        ("wait", "low 4"): (5, 5),
        ("compute", "low 3"): (4, 5),
        ("compute", "low 4"): (5, 6),
        ("copy", "low 3"): (2, 2.5),
        ("decode", "low 3"): (2.5, 4),
        ("read", "low 3"): (1, 2),
        ("lock", "low 3"): (2, 2.25),
        ("read straight", "low 4"): (1.5, 2),
    }
