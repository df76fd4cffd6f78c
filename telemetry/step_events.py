"""The marks of one step, and the figures that are read from them when the device has passed them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ..devices import Clock, DeviceEvent
from .read_timing import ReadSpan
from .trace import TraceSpan

VisitEvents: TypeAlias = tuple[int, DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent]
"""One visit: its block; when that was requested for, there, and decoded; when the last lane had passed.

Arrived and decoded are the same where the computing thread does not decode. A plain tuple: one is made for every visit.
"""


class BlockArrival(NamedTuple):
    """A visit may start for which a block was fetched."""

    block: int
    nbytes: int
    """Of the fetch."""
    requested: DeviceEvent
    """When the visit requested for it, as `arrived`."""
    arrived: DeviceEvent
    read: ReadSpan | None
    """What a file was read for it; None if RAM held the block from before."""
    copied: tuple[DeviceEvent, DeviceEvent] | None
    """When its copy out of RAM began and ended; None where there was none."""
    decoded: tuple[DeviceEvent, DeviceEvent] | None
    """When decoding and patching it began and ended, on whichever stream."""


class StepEvents:
    """What one step left behind while it ran."""

    def __init__(self, clock: Clock) -> None:
        self.visits: list[VisitEvents] = []
        self.arrivals: list[BlockArrival] = []
        self.skipped_lanes = self.skipped_visits = 0
        self._seconds = clock.seconds

    def compute_s(self) -> float:
        return sum(self._seconds(ready, done) for _, _, _, ready, done in self.visits)

    def stall_s(self) -> float:
        return sum(self._seconds(requested, arrived) for _, requested, arrived, _, _ in self.visits)

    def decode_s(self) -> float:
        return sum(self._seconds(*arrival.decoded) for arrival in self.arrivals if arrival.decoded is not None)

    def copies(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each copy out of RAM."""
        return [
            (arrival.nbytes, self._seconds(*arrival.copied)) for arrival in self.arrivals if arrival.copied is not None
        ]

    def bytes_moved(self) -> int:
        return sum(arrival.nbytes for arrival in self.arrivals)

    def reads(self) -> list[ReadSpan]:
        return [arrival.read for arrival in self.arrivals if arrival.read is not None]

    def read_s(self) -> float:
        """Time in which one reading was going on at least; two threads may read at once."""
        busy = reached = 0.0
        for read in sorted(self.reads(), key=lambda read: read.began):
            busy += max(0.0, read.ended - max(reached, read.began))
            reached = max(reached, read.ended)
        return busy

    def stall_on_read_s(self, end: DeviceEvent, now: float) -> float:
        """The part of the stall in which a block was still to leave its file; `end` was passed at `now`.

        A mark on a device has no time of the host: it is known by its distance to `end`.
        """
        total = 0.0
        for arrival in self.arrivals:
            if arrival.read is not None:
                late_s = arrival.read.ended - self._at(arrival.requested, end, now)
                total += min(max(late_s, 0.0), self._seconds(arrival.requested, arrival.arrived))
        return total

    def computed_from(self, end: DeviceEvent, now: float) -> float | None:
        """When the first block began to compute, by `time.perf_counter()`; None without visits."""
        return self._at(self.visits[0][3], end, now) if self.visits else None

    def spans(self, expert: str, end: DeviceEvent, now: float, began: float) -> Iterator[TraceSpan]:
        """Everything as rows of a trace, in seconds since `began`."""

        def span(row: str, block: int, first: DeviceEvent, last: DeviceEvent, **args: int) -> TraceSpan:
            at = self._at(first, end, now) - began
            return TraceSpan(row, f"{expert} {block}", at, at + self._seconds(first, last), args)

        for block, requested, arrived, ready, done in self.visits:
            yield span("wait", block, requested, arrived)
            yield span("compute", block, ready, done)
        for arrival in self.arrivals:
            if arrival.copied is not None:
                yield span("copy", arrival.block, *arrival.copied, bytes=arrival.nbytes)
            if arrival.decoded is not None:
                yield span("decode", arrival.block, *arrival.decoded)
            if (read := arrival.read) is not None:
                row = "read straight" if read.straight else "read"
                at = read.began - began, read.ended - began
                yield TraceSpan(row, f"{expert} {arrival.block}", *at, {"bytes": read.nbytes})

    def _at(self, mark: DeviceEvent, end: DeviceEvent, now: float) -> float:
        return now - self._seconds(mark, end)
