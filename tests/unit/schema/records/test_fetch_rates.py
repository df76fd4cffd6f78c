"""Ranges for fetches by rate."""

from __future__ import annotations

import pytest

from wanstream.schema.records.timeline import RATE_BORDERS, RateRange, together


@pytest.mark.parametrize(
    ("nbytes", "seconds", "border"),
    [
        (0, 1.0, 0),
        (999_999_999, 1.0, 0),
        (10**9, 1.0, 1),
        (5 * 10**9, 1.0, 5),
        (700 * 10**6, 0.028, 20),
        (160 * 10**9, 2.0, 80),
        (10**15, 1.0, 80),
        (1, 0.0, 80),
    ],
)
def test_a_border_belongs_to_the_range_above(nbytes: int, seconds: float, border: int) -> None:
    expected = RateRange(from_gb_per_s=border, fetches=1, nbytes=nbytes, busy_s=seconds)
    assert RateRange.of_fetch(nbytes, seconds) == expected


def test_ranges_of_several_runs_are_added_up_and_in_order() -> None:
    def of(border: int, fetches: int) -> RateRange:
        return RateRange(
            from_gb_per_s=border, fetches=fetches, nbytes=10 * fetches, busy_s=0.5 * fetches
        )

    assert together([of(20, 4), of(1, 2), of(20, 6)]) == (of(1, 2), of(20, 10))
    assert together([]) == ()


def test_sums_of_many_fetches_have_one_entry_per_range() -> None:
    rates = together(RateRange.of_fetch(number * 10**6, 0.01) for number in range(20_000))
    assert len(rates) == len(RATE_BORDERS)
    assert sum(each.fetches for each in rates) == 20_000
