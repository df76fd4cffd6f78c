"""Videos on a pipeline, against closed forms and against a clock that goes from event to event."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.plan.fleet_queue import StageSeconds, run_queue

SECONDS = st.sampled_from((0.5, 1.0, 2.0, 7.0))
STAGES = st.lists(st.builds(StageSeconds, first_s=SECONDS, next_s=SECONDS), min_size=1, max_size=4)


def _warm(*seconds: float) -> list[StageSeconds]:
    return [StageSeconds(first_s=each, next_s=each) for each in seconds]


@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 30), st.sampled_from((0.0, 0.25)))
def test_one_cell_per_stage_fills_then_goes_at_the_pace_of_the_slowest(
    seconds: list[float], videos: int, handover_s: float
) -> None:
    run = run_queue(_warm(*seconds), cells=1, videos=videos, handover_s=handover_s)
    filled = sum(seconds) + handover_s * (len(seconds) - 1)
    assert run.done_s[0] == pytest.approx(filled)
    assert run.makespan_s == pytest.approx(filled + (videos - 1) * max(seconds))


@given(SECONDS, st.integers(1, 9), st.integers(1, 40))
def test_one_stage_goes_in_rounds(seconds: float, cells: int, videos: int) -> None:
    assert run_queue(_warm(seconds), cells=cells, videos=videos).makespan_s == pytest.approx(
        -(-videos // cells) * seconds
    )


def _by_clock(stages: Sequence[StageSeconds], cells: int, videos: int, handover_s: float) -> float:
    """The end of the last video: the time goes to whatever happens next."""
    free = [[0.0] * cells for _ in stages]
    passed = [[0] * cells for _ in stages]
    waiting = [deque([0.0] * videos), *(deque[float]() for _ in stages)]
    for place, seconds in enumerate(stages):
        done = []
        while waiting[place]:
            at = waiting[place].popleft()
            cell = min(range(cells), key=lambda each: (free[place][each], each))
            begin = max(at, free[place][cell])
            free[place][cell] = begin + (seconds.next_s if passed[place][cell] else seconds.first_s)
            passed[place][cell] += 1
            done.append(free[place][cell])
        last = place == len(stages) - 1
        waiting[place + 1].extend(sorted(end + (0.0 if last else handover_s) for end in done))
    return max(waiting[-1])


@given(STAGES, st.integers(1, 4), st.integers(1, 12), st.sampled_from((0.0, 0.25)))
def test_nobody_is_lost_and_nobody_is_faster_than_the_work(
    stages: list[StageSeconds], cells: int, videos: int, handover_s: float
) -> None:
    run = run_queue(stages, cells=cells, videos=videos, handover_s=handover_s)
    assert run.makespan_s == pytest.approx(_by_clock(stages, cells, videos, handover_s))
    assert len(run.done_s) == videos
    assert run.done_s[-1] == run.makespan_s
    for stage, passed, busy in zip(stages, run.videos, run.busy_s, strict=True):
        assert sum(passed) == videos
        for count, seconds in zip(passed, busy, strict=True):
            expected = stage.first_s + (count - 1) * stage.next_s if count else 0.0
            assert seconds == pytest.approx(expected)
        assert run.makespan_s >= max(busy) - 1e-9


def test_the_first_video_of_a_cell_may_take_longer() -> None:
    run = run_queue([StageSeconds(first_s=5.0, next_s=1.0)], cells=2, videos=5)
    assert run.done_s == (5.0, 5.0, 6.0, 6.0, 7.0)
    assert run.videos == ((3, 2),)


@pytest.mark.parametrize(("cells", "videos"), [(0, 1), (1, 0)])
def test_somebody_must_do_something(cells: int, videos: int) -> None:
    with pytest.raises(ValueError, match=f"{videos} videos on {cells} cells"):
        run_queue(_warm(1.0), cells=cells, videos=videos)
