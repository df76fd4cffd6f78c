"""A step's figures from events.

On a CPU an event is a host time, so sums can be checked by hand.
"""

from __future__ import annotations

import pytest
import torch

from wanstream.devices.clock import clock_for
from wanstream.schema.records import Transfers
from wanstream.telemetry.step_events import BlockArrival, ReadSpan, StepEvents, VisitEvents

CLOCK = clock_for(torch.device("cpu"))


def arrival(
    block: int,
    asked: float,
    arrived: float,
    *,
    read: ReadSpan | None = None,
    copied: tuple[float, float] | None = None,
    decoded: tuple[float, float] | None = None,
) -> BlockArrival:
    return BlockArrival(block, 100, asked, arrived, read, copied, decoded)


def read(
    began: float, ended: float, *, straight: bool = False, locked: tuple[float, float] | None = None
) -> ReadSpan:
    return ReadSpan(began, ended, 60, straight, locked)


def marks(*arrivals: BlockArrival, visits: tuple[VisitEvents, ...] = ()) -> StepEvents:
    step = StepEvents(CLOCK)
    step.arrivals += arrivals
    step.visits += visits
    return step


def test_visits_give_stall_and_computing() -> None:
    step = marks(visits=((0, 10.0, 11.0, 11.5, 13.0), (1, 13.0, 13.25, 13.25, 15.25)))
    assert (step.transfers(16.0, 16.0).stall_s, step.compute_s()) == (1.25, 3.5)
    assert step.computed_from(end=16.0, now=16.0, run_start=0.0) == 11.5


def test_an_empty_step_has_nothing() -> None:
    step = marks()
    assert step.transfers(1, 1) == Transfers(stall_s=0, bytes_moved=0)
    assert (step.compute_s(), step.decode_s(), step.copies, step.read_shares) == (0, 0, [], [])
    assert step.computed_from(1, 1, 0.0) is None


def test_only_what_was_copied_counts_as_copied() -> None:
    step = marks(
        arrival(0, 0, 0, copied=(1.0, 3.0)), arrival(1, 0, 0, decoded=(4.0, 5.0)), arrival(2, 0, 0)
    )
    assert step.transfers(9, 9).bytes_moved == 300
    assert (step.copies, step.decode_s()) == ([(100, 2.0)], 1.0)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([(1, 2), (3, 4)], 2),
        ([(3, 4), (1, 2)], 2),
        ([(1, 4), (2, 3)], 3),  # two threads: one read inside the other
        ([(1, 3), (2, 5)], 4),
        ([(1, 3), (3, 5)], 4),
    ],
)
def test_reading_is_busy_while_one_reading_goes_on_at_least(
    spans: list[tuple[float, float]], busy: float
) -> None:
    step = marks(*(arrival(block, 0, 0, read=read(*span)) for block, span in enumerate(spans)))
    assert step.transfers(9, 9).read_s == busy


@pytest.mark.parametrize(
    ("ended", "stall_on_read_s"),
    [(9.0, 0.0), (10.0, 0.0), (10.5, 0.5), (12.0, 2.0), (14.0, 2.0)],
    ids=["read before", "just read", "half", "all", "later"],
)
def test_a_stall_is_the_files_until_its_reading_has_ended(
    ended: float, stall_on_read_s: float
) -> None:
    step = marks(arrival(0, 10.0, 12.0, read=read(1.0, ended)), arrival(1, 20.0, 23.0))
    assert step.transfers(end=30.0, now=30.0).stall_on_read_s == stall_on_read_s


def test_times_of_a_device_are_laid_on_those_of_the_host_by_the_end_of_the_step() -> None:
    """A device whose time line starts elsewhere: 1000 s ahead of the host's."""
    step = marks(
        arrival(0, 1010.0, 1012.0, read=read(1.0, 11.0)),
        visits=((0, 1010.0, 1012.0, 1012.0, 1013.0),),
    )
    assert step.transfers(end=1020.0, now=20.0).stall_on_read_s == 1.0
    assert step.computed_from(end=1020.0, now=20.0, run_start=0.0) == 12.0


def test_rows_of_a_trace() -> None:
    step = marks(
        arrival(
            3,
            10.0,
            11.0,
            read=read(8.0, 9.0, locked=(9.0, 9.25)),
            copied=(9.0, 9.5),
            decoded=(9.5, 11.0),
        ),
        arrival(4, 12.0, 12.0, read=read(8.5, 9.0, straight=True)),
        visits=((3, 10.0, 11.0, 11.0, 12.0), (4, 12.0, 12.0, 12.0, 13.0)),
    )
    spans = {
        (span.row, span.name): (span.start_s, span.end_s)
        for span in step.spans("low", 13.0, 13.0, run_start=7.0)
    }
    assert spans == {
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
