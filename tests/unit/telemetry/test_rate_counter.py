"""Histograms of fetch rates."""

from __future__ import annotations

from wanstream.schema.timeline import RATE_BORDERS, RateRange
from wanstream.telemetry.recorder import RateCounter


def test_each_fetch_falls_into_the_range_of_its_own_rate() -> None:
    counter = RateCounter()
    assert counter.ranges() == ()
    counter.add([(2 * 10**9, 1.0), (30 * 10**9, 1.0)])
    counter.add([(3 * 10**9, 1.5)])
    assert counter.ranges() == (
        RateRange(from_gb_per_s=1, fetches=2, nbytes=5 * 10**9, busy_s=2.5),
        RateRange(from_gb_per_s=20, fetches=1, nbytes=30 * 10**9, busy_s=1.0),
    )


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    counter = RateCounter()
    counter.add((number * 10**6, 0.01) for number in range(20_000))
    assert len(counter.ranges()) == len(RATE_BORDERS)
    assert sum(rates.fetches for rates in counter.ranges()) == 20_000
