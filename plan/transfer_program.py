"""Transfer program: block lifetimes, their buffers, and every fetch of a run, compiled before the run starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import NamedTuple

from ..schema import Residency
from .visits import BlockKey, Visit


class Lifetime(NamedTuple):
    """Live range of one block in one buffer, from visit `first` to visit `last`, both included."""

    block: BlockKey
    first: int
    last: int
    resident_first: bool
    """True for residents of the first stage and permanent ones, which are kept first if they are loaded already."""


def list_lifetimes(visits: Sequence[Visit], residency: Residency) -> tuple[list[Lifetime], list[int]]:
    """Return the lifetimes of a run in order of their first visit, and for each visit the index of its lifetime.

    There is one lifetime per visit of a streamed block, and one per stage of a resident block.

    A permanent resident has one lifetime in the whole run, or one for each change of its patch.
    """
    lifetimes: list[Lifetime] = []
    of_visit: list[int] = []
    resident_lifetimes: dict[BlockKey, int] = {}
    first_stage = True
    for index, visit in enumerate(visits):
        if index and (visit.expert, visit.patch) != (visits[index - 1].expert, visits[index - 1].patch):
            first_stage = False
            if not residency.permanent:
                resident_lifetimes.clear()
        key = visit.key
        lifetime = resident_lifetimes.get(key.stored)
        if lifetime is None or lifetimes[lifetime].block != key:
            lifetime = len(lifetimes)
            resident = residency.keeps(*key)
            lifetimes.append(Lifetime(key, index, index, resident and (first_stage or residency.permanent)))
            if resident:
                resident_lifetimes[key.stored] = lifetime
        else:
            lifetimes[lifetime] = lifetimes[lifetime]._replace(last=index)
        of_visit.append(lifetime)
    return lifetimes, of_visit


def max_overlap(lifetimes: Sequence[Lifetime]) -> int:
    """Return the largest number of `lifetimes` that include the same visit."""
    change = [0] * (max((lifetime.last for lifetime in lifetimes), default=0) + 2)
    for lifetime in lifetimes:
        change[lifetime.first] += 1
        change[lifetime.last + 1] -= 1
    return max(accumulate(change))


IMMEDIATE = -1
"""`start_after` of a fetch that waits for no visit of the program."""

KEPT = -1
"""`visit_fetch` of a visit whose block was in its buffer before the program."""


class ProgramError(ValueError):
    """Transfer program that cannot be compiled, or in which a visit would read a wrong block."""


class Fetch(NamedTuple):
    """Transfer of one block into one buffer.

    It may start when visit `start_after` is done (`IMMEDIATE`: immediately) and must be complete before visit
    `needed_by`; the buffer is free again when visit `last` is done. All three are indices into the program's visits.
    """

    block: BlockKey
    buffer: int
    start_after: int
    needed_by: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TransferProgram:
    """Visits of a run and their fetches; executed by the engine, predicted by `simulate`."""

    visits: tuple[Visit, ...]
    fetches: tuple[Fetch, ...]
    """Fetches in bus order: a single copy queue that processes them in this order cannot deadlock."""
    buffers: int
    """Number of buffers."""
    visit_buffer: tuple[int, ...]
    """For each visit: the buffer that contains its block."""
    visit_fetch: tuple[int, ...]
    """For each visit: index of the fetch of its block, or `KEPT`."""
    initial: Mapping[int, BlockKey]
    """Earlier contents of buffers that visits of this program use."""
    untouched: Mapping[int, BlockKey]
    """Earlier contents of buffers that this program neither uses nor replaces."""

    @cached_property
    def last_use(self) -> frozenset[int]:
        """Visits after which the buffer of the visit is free."""
        kept_until = {self.visit_buffer[visit]: visit for visit, fetch in enumerate(self.visit_fetch) if fetch == KEPT}
        return frozenset(kept_until.values()).union(fetch.last for fetch in self.fetches)


def compile_program(
    visits: Sequence[Visit],
    residency: Residency,
    buffers: int,
    *,
    contents: Mapping[int, BlockKey] | None = None,
) -> TransferProgram:
    """Assign a buffer to every visit and a fetch to every missing block.

    Args:
        visits: visits of the run, in order.
        residency: resident blocks of each expert.
        buffers: number of buffers.
        contents: contents of the buffers before the program (buffer -> block). It includes every fetch that was
            *issued*, complete or not; the caller must wait for all visits of the program that issued them. Buffers
            from number `buffers` on are ignored.

    Raises:
        ProgramError: if there are too few buffers; the message has the number needed.
    """
    visits = tuple(visits)
    lifetimes, of_visit = list_lifetimes(visits, residency)
    needed = max_overlap(lifetimes)
    if buffers < needed:
        raise ProgramError(f"{buffers} buffers are too few: these residents and visits need {needed}")

    loaded = {buffer: block for buffer, block in sorted((contents or {}).items()) if 0 <= buffer < buffers}
    kept = _kept_lifetimes(lifetimes, buffers, loaded)
    buffer_of, fetches, fetch_of = _assign_buffers(lifetimes, buffers, loaded, kept)
    initial = {buffer: lifetimes[lifetime].block for lifetime, buffer in kept.items()}
    replaced = {fetch.buffer for fetch in fetches}
    return TransferProgram(
        visits=visits,
        fetches=tuple(fetches),
        buffers=buffers,
        visit_buffer=tuple(buffer_of[lifetime] for lifetime in of_visit),
        visit_fetch=tuple(fetch_of[lifetime] for lifetime in of_visit),
        initial=initial,
        untouched={b: block for b, block in loaded.items() if b not in initial and b not in replaced},
    )


def _kept_lifetimes(lifetimes: Sequence[Lifetime], buffers: int, loaded: Mapping[int, BlockKey]) -> dict[int, int]:
    """Return the lifetimes that need no fetch because a buffer contains their block already (lifetime -> buffer).

    Residents of the first stage are kept first. The remaining buffers serve the next lifetimes in order; those of them
    that are loaded are kept too. Keeping more would take buffers from blocks that are needed earlier.
    """
    buffers_of: dict[BlockKey, list[int]] = {}
    for buffer, block in loaded.items():
        buffers_of.setdefault(block, []).append(buffer)
    kept: dict[int, int] = {}

    def keep_if_loaded(lifetime: int) -> None:
        if candidates := buffers_of.get(lifetimes[lifetime].block):
            kept[lifetime] = candidates.pop(0)

    first_of: dict[BlockKey, int] = {}  # a permanent resident whose patch returns has a lifetime before and one after
    for number, lifetime in enumerate(lifetimes):
        if lifetime.resident_first and lifetime.block in buffers_of:
            first_of.setdefault(lifetime.block, number)
    residents = first_of.values()
    # A kept resident occupies its buffer from the start, not only from its first visit. In the rest of a last step each
    # resident is visited only once, and the program may have too few buffers for that.
    from_the_start = {number: lifetimes[number]._replace(first=0) for number in residents}
    if max_overlap([from_the_start.get(number, lifetime) for number, lifetime in enumerate(lifetimes)]) <= buffers:
        for number in residents:
            keep_if_loaded(number)
    others = (number for number in range(len(lifetimes)) if number not in kept)
    for number in list(islice(others, buffers - len(kept))):
        keep_if_loaded(number)
    return kept


def _assign_buffers(
    lifetimes: Sequence[Lifetime], buffers: int, loaded: Mapping[int, BlockKey], kept: Mapping[int, int]
) -> tuple[list[int], list[Fetch], list[int]]:
    """Return the buffer of each lifetime, all fetches in bus order, and the fetch index of each lifetime (or KEPT).

    Each lifetime, in order of its first visit, gets the buffer that has been free for the longest time.
    """
    taken = set(kept.values())
    # Empty buffers first: contents that a later run may use are overwritten last.
    idle = deque(sorted((b for b in range(buffers) if b not in taken), key=lambda buffer: buffer in loaded))
    busy: list[tuple[int, int]] = []  # heap of (visit after which the buffer is free, buffer)
    for number, buffer in kept.items():
        heappush(busy, (lifetimes[number].last, buffer))

    buffer_of: list[int] = []
    fetch_of: list[int] = []
    fetches: list[Fetch] = []
    for number, lifetime in enumerate(lifetimes):
        if number in kept:
            buffer_of.append(kept[number])
            fetch_of.append(KEPT)
            continue
        free_since, buffer = (IMMEDIATE, idle.popleft()) if idle else heappop(busy)
        assert free_since < lifetime.first, "more lifetimes overlap than there are buffers"
        heappush(busy, (lifetime.last, buffer))
        buffer_of.append(buffer)
        fetch_of.append(len(fetches))
        fetches.append(Fetch(lifetime.block, buffer, free_since, lifetime.first, lifetime.last))
    return buffer_of, fetches, fetch_of
