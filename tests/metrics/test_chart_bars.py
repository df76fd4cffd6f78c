"""Which bars a chart has for many steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wanstream.metrics.chart_bars import MOST_BARS, bars, numbered_every
from wanstream.plan import Timeline

MakeTimeline = Callable[..., Timeline]


def test_each_step_has_a_bar_while_there_is_room(make_timeline: MakeTimeline) -> None:
    steps = make_timeline(*[1.0] * MOST_BARS).steps
    assert bars(steps) == steps
    assert len(bars(make_timeline(*[1.0] * (MOST_BARS + 1)).steps)) < MOST_BARS


@pytest.mark.parametrize("switch", [1, 4_999, 5_000, 9_999, 20_000])
def test_neighbours_of_one_expert_share_a_bar(switch: int, make_timeline: MakeTimeline) -> None:
    steps = make_timeline(*[1.0] * 10_000, switch=switch).steps
    found = bars(steps)
    assert MOST_BARS // 2 < len(found) <= MOST_BARS
    ends = [*(bar.index for bar in found[1:]), len(steps)]
    for bar, end in zip(found, ends, strict=True):
        assert {step.expert for step in steps[bar.index : end]} == {bar.expert}


def test_a_bar_has_the_mean_of_the_seconds_and_the_most_of_the_memory(make_timeline: MakeTimeline) -> None:
    one, other = (make_timeline(wall, stall_s=wall / 4, device_bytes=int(wall)).steps for wall in (4.0, 8.0))
    first, *_ = bars([*one, *other] * 3, most=5)
    assert (first.wall_s, first.stall_s, first.compute_s, first.device_bytes) == (6.0, 1.5, 4.5, 8)
    assert first.rss_bytes is None


@pytest.mark.parametrize(
    ("pitch", "room", "every"), [(50, 20, 1), (20, 20, 1), (19, 20, 5), (5, 21, 10), (0.1, 30, 50)]
)
def test_numbers_have_room(pitch: float, room: float, every: int) -> None:
    assert numbered_every(pitch, room) == every
