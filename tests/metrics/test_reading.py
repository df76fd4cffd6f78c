"""How long readings took, and what of them came from a disk: as the kernel counts it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from wanstream.metrics.reading import KernelCounter, ReadMeter

COUNTERS = "/proc/self/io"


@pytest.fixture
def meter() -> Iterator[ReadMeter]:
    with ReadMeter() as meter:
        yield meter


class Counter:
    """A disk that gives what a test says."""

    def __init__(self) -> None:
        self.count = 1000

    def read_bytes(self) -> int:
        return self.count

    def give(self, nbytes: int) -> None:
        self.count += nbytes

    def close(self) -> None:
        return


def open_counters() -> set[str]:
    """Descriptors of this process that are the kernel's counters."""
    folder = Path("/proc/self/fd")
    found = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        if os.path.lexists(entry) and os.readlink(entry).endswith("/io"):
            found.add(entry.name)
    return found


needs_counters = pytest.mark.skipif(not os.access(COUNTERS, os.R_OK), reason="this kernel does not count reads")


def test_a_reading_is_called_once_and_timed(meter: ReadMeter) -> None:
    calls = list[int]()
    spans = [meter.measure(lambda: calls.append(1), 10, name="read", straight=straight) for straight in (False, True)]
    assert calls == [1, 1]
    assert [span.nbytes for span in spans] == [10, 10]
    assert [span.straight for span in spans] == [False, True]
    for first, second in pairwise([spans[0].began, spans[0].ended, spans[1].began, spans[1].ended]):
        assert first <= second
    assert meter.spent_s > 0


@needs_counters
def test_what_no_disk_gave_came_from_the_page_cache(meter: ReadMeter) -> None:
    assert meter.measure(lambda: None, 10, name="read").cached_bytes == 10


@needs_counters
def test_a_reading_that_fails_raises_and_leaves_the_meter_usable(meter: ReadMeter) -> None:
    def fail() -> None:
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        meter.measure(fail, 10, name="read")
    assert meter.measure(lambda: None, 10, name="read").cached_bytes == 10


def test_two_readings_side_by_side_are_charged_once() -> None:
    counter = Counter()
    meter = ReadMeter(counter=counter)
    inside, over = threading.Event(), threading.Event()
    found = list[int | None]()

    def slow() -> None:
        counter.give(20)
        inside.set()
        assert over.wait(30)

    other = threading.Thread(target=lambda: found.append(meter.measure(slow, 100, name="slow").cached_bytes))
    other.start()
    assert inside.wait(30)
    found.append(meter.measure(lambda: counter.give(110), 100, name="quick").cached_bytes)  # of both
    over.set()
    other.join()
    assert found == [0, 70], "100 for the one that ended first, and 30 for the other"


def test_readahead_counts_for_the_block_behind() -> None:
    counter = Counter()
    meter = ReadMeter(counter=counter)
    assert meter.measure(lambda: counter.give(150), 100, name="read").cached_bytes == 0
    counter.give(9999)  # to somebody else, between the readings
    assert meter.measure(lambda: None, 100, name="read").cached_bytes == 50
    assert meter.measure(lambda: None, 100, name="read").cached_bytes == 100


@needs_counters
def test_the_counters_are_opened_with_the_first_reading_and_closed() -> None:
    before = open_counters()
    meter = ReadMeter()
    assert open_counters() == before
    meter.measure(lambda: None, 1, name="read")
    assert len(open_counters()) == len(before) + 1
    meter.close()
    meter.close()
    assert open_counters() == before


def test_without_the_kernels_counters_nothing_is_said_of_the_cache(tmp_path: Path) -> None:
    with ReadMeter(counter=KernelCounter(str(tmp_path / "none"))) as meter:
        assert meter.measure(lambda: None, 10, name="read").cached_bytes is None
