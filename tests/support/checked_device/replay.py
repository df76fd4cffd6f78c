"""Replay of a machine's trace through torch's detector for races between streams.

It is an independent second opinion. The detector assumes one host thread and follows data pointers.
So a trace has the order in which calls arrived from all threads, and every piece of memory between
two access boundaries counts as one data pointer.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch.cuda._sanitizer import EventHandler, SynchronizationError

from .clocks import History
from .machine import HostAccess, HostWait, Issued, Range, Stream, StreamWait, TraceEntry, Work


def races(trace: Sequence[TraceEntry]) -> list[SynchronizationError]:
    """Return the accesses in `trace` that torch finds unordered."""
    pieces = _Pieces(trace)
    handler = EventHandler()
    found = []
    numbers: defaultdict[Stream | Work | HostAccess, int] = defaultdict(itertools.count(1).__next__)

    def launch(stream: int, accesses: Iterable[Range], words: str) -> None:
        read = set()
        written = set()
        for access in accesses:
            (written if access.write else read).update(pieces.of(access))
        names = {piece: [words] for piece in read | written}
        accesses = read - written, written, set()
        found.extend(handler._handle_kernel_launch(stream, *accesses, words, names))

    for entry in trace:
        match entry:
            case Issued():
                launch(numbers[entry.stream], entry.accesses, entry.words)
                if entry.work is not None:
                    handler._handle_event_record(numbers[entry.work], numbers[entry.stream])
            case StreamWait():
                handler._handle_event_wait(numbers[entry.work], numbers[entry.stream])
            case HostWait():
                handler._handle_event_synchronization(numbers[entry.work])
            case HostAccess():
                # A new stream is ordered behind everything the host has waited for, and all streams
                # behind this access.
                handler._handle_stream_creation(numbers[entry])
                launch(numbers[entry], [entry.access], entry.words)
                handler._handle_stream_synchronization(numbers[entry])
    return found


class _Pieces:
    """Piece numbers for each memory, cut by the accesses in a trace."""

    def __init__(self, trace: Sequence[TraceEntry]) -> None:
        cuts: defaultdict[History, set[int]] = defaultdict(set)
        for entry in trace:
            for access in entry.accesses if isinstance(entry, Issued) else ():
                cuts[access.history] |= {access.start, access.stop}
            if isinstance(entry, HostAccess):
                cuts[entry.access.history] |= {entry.access.start, entry.access.stop}
        self._cuts = {history: sorted(points) for history, points in cuts.items()}
        counts = [len(points) for points in self._cuts.values()]
        self._first = dict(zip(self._cuts, itertools.accumulate(counts, initial=1), strict=False))

    def of(self, access: Range) -> range:
        points = self._cuts[access.history]
        first = self._first[access.history]
        start, stop = (bisect.bisect_left(points, at) for at in (access.start, access.stop))
        return range(first + start, first + stop)
