"""Vector clocks for host threads and streams, and the accesses to a memory range they order.

Two accesses to the same bytes, one of them a write, are a race unless the later one's clock
contains the earlier one's time. One execution therefore stands for all device schedules with the
same order of host calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Clock: TypeAlias = dict[int, int]
"""Time of every actor ordered before."""

_NUMBERS = itertools.count()


class Actor:
    """Host thread or stream: a sequence of accesses with a separate time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_NUMBERS)
        self.clock: Clock = {self.number: 0}

    def tick(self) -> int:
        """Advance the time by one and return it."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def join(self, clock: Clock) -> None:
        """Come after everything in `clock`."""
        for actor, time in clock.items():
            if self.clock.get(actor, -1) < time:
                self.clock[actor] = time


class Access(NamedTuple):
    """An access's time and place."""

    actor: int
    time: int
    words: str


@dataclass
class Segment:
    """Bytes `start` to `stop` of a memory with equal accesses.

    The accesses are the last write, and the reads since, by actor.
    """

    start: int
    stop: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def split(self, at: int) -> Segment:
        """Cut off and return the part from `at` on."""
        rest = Segment(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest


class History:
    """Accesses to one memory with `nbytes` bytes.

    Args:
        nbytes: the memory's size.
        report: called with a message for each race.
    """

    def __init__(self, nbytes: int, report: Callable[[str], None]) -> None:
        self._segments = [Segment(0, nbytes)]
        self._report = report

    def add(self, start: int, stop: int, *, actor: Actor, words: str, write: bool) -> None:
        """Add an access by `actor` at the current time, and report races with earlier accesses."""
        access = Access(actor.number, actor.clock[actor.number], words)
        race = f"race: {words} {'writes' if write else 'reads'} bytes that are not ordered behind"
        for segment in self._overlapping(start, stop):
            earlier = [] if segment.write is None else [segment.write]
            if write:
                earlier += segment.reads.values()
            for other in earlier:
                if actor.clock.get(other.actor, -1) < other.time:
                    self._report(f"{race} {other.words}")
            if write:
                segment.write = access
                segment.reads = {}
            else:
                segment.reads[access.actor] = access

    def _overlapping(self, start: int, stop: int) -> list[Segment]:
        found = []
        segments = []
        for segment in self._segments:
            parts = [segment]
            for at in (start, stop):
                if parts[-1].start < at < parts[-1].stop:
                    parts.append(parts[-1].split(at))
            segments += parts
            found += [part for part in parts if start <= part.start and part.stop <= stop]
        self._segments = segments
        return found
