"""Counts fetches by how fast they went, in a memory of fixed size."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan.fetch_rates import RATE_BORDERS, RateRange, rate_range


class RateCounter:
    """The fetches of one route."""

    def __init__(self) -> None:
        self._fetches = dict.fromkeys(RATE_BORDERS, 0)
        self._nbytes = dict.fromkeys(RATE_BORDERS, 0)
        self._busy_s = dict.fromkeys(RATE_BORDERS, 0.0)

    def add(self, moves: Iterable[tuple[int, float]]) -> None:
        """Count moves, each the bytes and seconds of one fetch."""
        for nbytes, seconds in moves:
            border = rate_range(nbytes, seconds)
            self._fetches[border] += 1
            self._nbytes[border] += nbytes
            self._busy_s[border] += seconds

    def ranges(self) -> tuple[RateRange, ...]:
        """What was counted so far: the ranges that hold something, in order."""
        return tuple(
            RateRange(from_gb_per_s=border, fetches=fetches, nbytes=self._nbytes[border], busy_s=self._busy_s[border])
            for border, fetches in self._fetches.items()
            if fetches
        )
