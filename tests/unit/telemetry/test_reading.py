"""Timing of block reads."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wanstream.telemetry.step_events import ReadTimer


def test_a_reading_is_called_once_and_timed() -> None:
    meter, calls = ReadTimer(), list[int]()
    spans = [meter.measure(lambda: calls.append(1), 10, name="read", straight=straight) for straight in (False, True)]
    assert calls == [1, 1]
    assert [span.nbytes for span in spans] == [10, 10]
    assert [span.straight for span in spans] == [False, True]
    for first, second in pairwise([spans[0].start, spans[0].end, spans[1].start, spans[1].end]):
        assert first <= second


def test_a_reading_that_fails_raises() -> None:
    def fail() -> None:
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        ReadTimer().measure(fail, 10, name="read")
