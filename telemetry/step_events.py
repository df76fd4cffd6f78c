"""Events of one step, including reads, and the figures computed from them after the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

from ..devices import Clock, DeviceEvent
from ..schema.records import Transfers
from .trace import TraceSpan


class ReadSpan(NamedTuple):
    """One read for one block. Times are `time.perf_counter()` values."""

    start: float
    end: float
    nbytes: int
    """Bytes requested from the file."""
    straight: bool
    """True for a read directly into a buffer, False for a read into a RAM slot."""
    locked: tuple[float, float] | None = None
    """Start and end of page-locking the slot, including the wait for other locks. None if it was
    locked already."""


VisitEvents: TypeAlias = tuple[int, DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent]
"""Block and events of one visit.

The events are requested, arrived, ready (decoded) and done (after the last lane). Arrived and ready
are the same event if the compute thread does not decode. There is one for every visit, hence a
plain tuple for speed.
"""


class BlockArrival(NamedTuple):
    """Events of one fetch, recorded by the first visit that uses the block."""

    block: int
    nbytes: int
    """Bytes fetched."""
    requested: DeviceEvent
    """The visit started to wait for the block."""
    arrived: DeviceEvent
    """The block was in its buffer."""
    read: ReadSpan | None
    """File read for this fetch. None if the block was in RAM already."""
    copied: tuple[DeviceEvent, DeviceEvent] | None
    """Start and end of the copy out of RAM. None without a copy."""
    decoded: tuple[DeviceEvent, DeviceEvent] | None
    """Start and end of decoding and patching, on any stream. None without decoding."""


class StepEvents:
    """Events collected in one step.

    The methods compute figures once the device has passed all events.
    """

    def __init__(self, clock: Clock) -> None:
        self.visits: list[VisitEvents] = []
        self.arrivals: list[BlockArrival] = []
        self.skipped_lanes = self.skipped_visits = 0
        self._seconds = clock.seconds

    def compute_s(self) -> float:
        return sum(self._seconds(ready, done) for _, _, _, ready, done in self.visits)

    def decode_s(self) -> float:
        spans = [arrival.decoded for arrival in self.arrivals if arrival.decoded is not None]
        return sum(self._seconds(*span) for span in spans)

    @cached_property
    def copies(self) -> list[tuple[int, float]]:
        """Bytes and seconds for each copy out of RAM."""
        return [
            (arrival.nbytes, self._seconds(*arrival.copied))
            for arrival in self.arrivals
            if arrival.copied is not None
        ]

    @cached_property
    def read_shares(self) -> list[tuple[int, float]]:
        """Bytes and seconds for each read, without the seconds that overlap an earlier read.

        Several blocks are read at once, by threads that begin the next one when the first has no
        work left for them.
        """
        reads = [arrival.read for arrival in self.arrivals if arrival.read is not None]
        shares: list[tuple[int, float]] = []
        covered_until = 0.0
        for read in sorted(reads, key=lambda read: read.start):
            shares.append((read.nbytes, max(0.0, read.end - max(covered_until, read.start))))
            covered_until = max(covered_until, read.end)
        return shares

    def transfers(self, end: DeviceEvent, now: float) -> Transfers:
        """Return the sums over the step.

        `end` is the step's last event and `now` its host time. A device event has no host time, so
        all others are converted by their distance to `end`.
        """
        stall_on_read_s = 0.0
        for arrival in self.arrivals:
            if arrival.read is not None:
                late_s = arrival.read.end - self._at(arrival.requested, end, now)
                waited_s = self._seconds(arrival.requested, arrival.arrived)
                # A stall lasts until the read ends, but no longer than the visit has waited.
                stall_on_read_s += min(max(late_s, 0.0), waited_s)
        return Transfers(
            stall_s=sum(self._seconds(asked, arrived) for _, asked, arrived, _, _ in self.visits),
            bytes_moved=sum(arrival.nbytes for arrival in self.arrivals),
            stall_on_read_s=stall_on_read_s,
            copied_bytes=sum(nbytes for nbytes, _ in self.copies),
            copy_s=sum(seconds for _, seconds in self.copies),
            read_bytes=sum(nbytes for nbytes, _ in self.read_shares),
            read_s=sum(seconds for _, seconds in self.read_shares),
        )

    def computed_from(self, end: DeviceEvent, now: float, run_start: float) -> float | None:
        """Return the start of the first block's compute in seconds since `run_start`.

        None without visits.
        """
        if self.visits:
            # Field 3 of a visit is `ready`, the start of the compute.
            return self._at(self.visits[0][3], end, now) - run_start
        return None

    def spans(
        self, expert: str, end: DeviceEvent, now: float, run_start: float
    ) -> Iterator[TraceSpan]:
        """Yield all events as trace spans, in seconds since `run_start`."""

        def span(
            row: str, block: int, first: DeviceEvent, last: DeviceEvent, **args: int
        ) -> TraceSpan:
            start_s = self._at(first, end, now) - run_start
            end_s = start_s + self._seconds(first, last)
            return TraceSpan(row, f"{expert} {block}", start_s, end_s, args)

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
