"""Events of one step, reads included, and the figures computed from them after the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ..devices import Clock, DeviceEvent
from .trace import TraceSpan


class ReadSpan(NamedTuple):
    """One read of one block. Times are values of `time.perf_counter()`."""

    start: float
    end: float
    nbytes: int
    """Bytes that were requested from the file."""
    straight: bool
    """True for a read directly into a buffer, False for a read into a RAM slot."""
    locked: tuple[float, float] | None = None
    """Start and end of page-locking the slot, with the wait for other locks. None if it was locked already."""


VisitEvents: TypeAlias = tuple[int, DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent]
"""One visit: the block, and the events requested, arrived, ready (decoded) and done (after the last lane).

Arrived and ready are the same event if the compute thread does not decode. A plain tuple for speed: there is one for
every visit.
"""


class BlockArrival(NamedTuple):
    """Events of one fetch, recorded by the first visit that uses the block."""

    block: int
    nbytes: int
    """Bytes of the fetch."""
    requested: DeviceEvent
    """The visit started to wait for the block."""
    arrived: DeviceEvent
    """The block was in its buffer."""
    read: ReadSpan | None
    """The file read for this fetch; None if the block was in RAM already."""
    copied: tuple[DeviceEvent, DeviceEvent] | None
    """Start and end of the copy out of RAM; None without a copy."""
    decoded: tuple[DeviceEvent, DeviceEvent] | None
    """Start and end of decoding and patching, on any stream; None if there was none."""


class StepEvents:
    """Collected events of one step; the methods compute its figures once the device has passed all of them."""

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
        """Return bytes and seconds of each copy out of RAM."""
        return [
            (arrival.nbytes, self._seconds(*arrival.copied)) for arrival in self.arrivals if arrival.copied is not None
        ]

    def bytes_moved(self) -> int:
        return sum(arrival.nbytes for arrival in self.arrivals)

    def reads(self) -> list[ReadSpan]:
        return [arrival.read for arrival in self.arrivals if arrival.read is not None]

    def read_shares(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of each read, without seconds of overlap with an earlier one.

        Several blocks are read at once, by threads that begin the next one when the first has no work left for them.
        """
        shares: list[tuple[int, float]] = []
        covered_until = 0.0
        for read in sorted(self.reads(), key=lambda read: read.start):
            shares.append((read.nbytes, max(0.0, read.end - max(covered_until, read.start))))
            covered_until = max(covered_until, read.end)
        return shares

    def read_s(self) -> float:
        """Return the seconds during which at least one read was active."""
        return sum(seconds for _, seconds in self.read_shares())

    def stall_on_read_s(self, end: DeviceEvent, now: float) -> float:
        """Return the part of the stall during which a block was still being read from its file.

        `end` is the last event of the step and `now` its time on the host: a device event has no host time, so all
        others are converted by their distance to `end`.
        """
        total = 0.0
        for arrival in self.arrivals:
            if arrival.read is not None:
                late_s = arrival.read.end - self._at(arrival.requested, end, now)
                total += min(max(late_s, 0.0), self._seconds(arrival.requested, arrival.arrived))
        return total

    def computed_from(self, end: DeviceEvent, now: float) -> float | None:
        """Return the `time.perf_counter()` value at which the first block started to compute; None without visits."""
        return self._at(self.visits[0][3], end, now) if self.visits else None

    def spans(self, expert: str, end: DeviceEvent, now: float, run_start: float) -> Iterator[TraceSpan]:
        """Yield all events as spans of a trace, in seconds since `run_start`."""

        def span(row: str, block: int, first: DeviceEvent, last: DeviceEvent, **args: int) -> TraceSpan:
            start_s = self._at(first, end, now) - run_start
            return TraceSpan(row, f"{expert} {block}", start_s, start_s + self._seconds(first, last), args)

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
                times = read.start - run_start, read.end - run_start
                yield TraceSpan(row, f"{expert} {arrival.block}", *times, {"bytes": read.nbytes})
                if read.locked is not None:
                    start, stop = (at - run_start for at in read.locked)
                    yield TraceSpan("lock", f"{expert} {arrival.block}", start, stop, {})

    def _at(self, event: DeviceEvent, end: DeviceEvent, now: float) -> float:
        return now - self._seconds(event, end)
