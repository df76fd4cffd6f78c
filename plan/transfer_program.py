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
    """One block in one buffer from visit `first` to visit `last`, both included.

    `stays` marks residents of the first stage and permanent ones: worth keeping if they are there at the start.
    """

    block: BlockKey
    first: int
    last: int
    stays: bool


class LifetimeList(NamedTuple):
    """Tenancies in order of their first visit, and for each visit the index of the tenancy that serves it."""

    lifetimes: tuple[Lifetime, ...]
    of_visit: tuple[int, ...]


def list_lifetimes(visits: Sequence[Visit], residency: Residency) -> LifetimeList:
    """A streamed block has one tenancy per visit; a resident one per stage, or one in all if permanent."""
    opened: list[tuple[BlockKey, int, bool]] = []
    last: list[int] = []
    of_visit: list[int] = []
    staying: dict[BlockKey, int] = {}
    first_stage = True
    for index, visit in enumerate(visits):
        if index and visit.expert != visits[index - 1].expert:
            first_stage = False
            if not residency.permanent:
                staying.clear()
        key = visit.key
        lifetime = staying.get(key)
        if lifetime is None:
            lifetime = len(opened)
            resident = residency.keeps(visit.expert, visit.block)
            opened.append((key, index, resident and (first_stage or residency.permanent)))
            last.append(index)
            if resident:
                staying[key] = lifetime
        last[lifetime] = index
        of_visit.append(lifetime)
    lifetimes = (Lifetime(key, first, end, stays) for (key, first, stays), end in zip(opened, last, strict=True))
    return LifetimeList(tuple(lifetimes), tuple(of_visit))


def buffers_needed(visits: Sequence[Visit], residency: Residency) -> int:
    """Smallest number of buffers with which `visits` can run: the most tenancies that ever overlap."""
    return most_overlapping(list_lifetimes(visits, residency).lifetimes)


def most_overlapping(lifetimes: Sequence[Lifetime]) -> int:
    """Largest number of `lifetimes` that hold a buffer during the same visit."""
    change = [0] * (max((lifetime.last for lifetime in lifetimes), default=0) + 2)
    for lifetime in lifetimes:
        change[lifetime.first] += 1
        change[lifetime.last + 1] -= 1
    return max(accumulate(change))


AT_ONCE = -1
"""`start_after` of a fetch that waits for no visit of the program."""

KEPT = -1
"""`visit_fetch` of a visit that is served by what its buffer held before the program."""


class ProgramError(ValueError):
    """A transfer program that cannot be made, or that would read a wrong block."""


class Fetch(NamedTuple):
    """One copy of a block into a buffer, and the visits between which it happens and serves.

    It may start when visit `start_after` is done (`AT_ONCE`: no visit), must have arrived before visit `needed_by`, and
    the buffer is free again when visit `last` is done. All three are indices into the program's visits.
    """

    block: BlockKey
    buffer: int
    start_after: int
    needed_by: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TransferProgram:
    """The visits of a run and the fetches that serve them; executed by the engine, predicted by `simulate`.

    `fetches` are in bus order: a single copy queue that works through them in this order can never block itself.
    """

    visits: tuple[Visit, ...]
    fetches: tuple[Fetch, ...]
    buffers: int
    visit_buffer: tuple[int, ...]
    """Per visit: the buffer that serves it."""
    visit_fetch: tuple[int, ...]
    """Per visit: index of the fetch that serves it, or `KEPT`."""
    initial: Mapping[int, BlockKey]
    """Buffers whose earlier contents serve visits of this program."""
    untouched: Mapping[int, BlockKey]
    """Buffers whose earlier contents serve nothing here, but outlive the program because nothing replaces them."""

    @cached_property
    def last_use(self) -> frozenset[int]:
        """Visits after which their buffer is free."""
        kept_until = {self.visit_buffer[visit]: visit for visit, fetch in enumerate(self.visit_fetch) if fetch == KEPT}
        return frozenset(kept_until.values()).union(fetch.last for fetch in self.fetches)

    def final_contents(self) -> dict[int, BlockKey]:
        """What each buffer holds when every fetch has been issued: `contents` for the program of the next run."""
        return {**self.untouched, **self.initial, **{fetch.buffer: fetch.block for fetch in self.fetches}}


def compile_program(
    visits: Sequence[Visit],
    residency: Residency,
    buffers: int,
    *,
    contents: Mapping[int, BlockKey] | None = None,
) -> TransferProgram:
    """Assign every visit a buffer and every missing block a fetch.

    `contents` says what buffers hold from before (buffer -> block), counting every fetch that was *issued*, arrived or
    not; all visits of the program that issued them must be done, or be awaited, before this one starts. Buffers that it
    names beyond `buffers` are ignored. Raises ProgramError, with the number needed, when there are too few buffers.
    """
    visits = tuple(visits)
    lifetimes, of_visit = list_lifetimes(visits, residency)
    needed = most_overlapping(lifetimes)
    if buffers < needed:
        raise ProgramError(f"{buffers} buffers are too few: these residents and visits need {needed}")

    held = {buffer: block for buffer, block in sorted((contents or {}).items()) if 0 <= buffer < buffers}
    kept = _kept_lifetimes(lifetimes, buffers, held)
    buffer_of, fetches, fetch_of = _assign_buffers(lifetimes, buffers, held, kept)
    initial = {buffer: lifetimes[lifetime].block for lifetime, buffer in kept.items()}
    replaced = {fetch.buffer for fetch in fetches}
    return TransferProgram(
        visits=visits,
        fetches=tuple(fetches),
        buffers=buffers,
        visit_buffer=tuple(buffer_of[lifetime] for lifetime in of_visit),
        visit_fetch=tuple(fetch_of[lifetime] for lifetime in of_visit),
        initial=initial,
        untouched={b: block for b, block in held.items() if b not in initial and b not in replaced},
    )


def _kept_lifetimes(lifetimes: Sequence[Lifetime], buffers: int, held: Mapping[int, BlockKey]) -> dict[int, int]:
    """Tenancies that need no fetch because a buffer holds their block already: tenancy -> buffer.

    Residents of the present stage are kept first. The buffers that are left serve the next tenancies, and of those the
    ones that are held are kept too. Keeping more would take buffers from blocks that are needed earlier.
    """
    holders: dict[BlockKey, list[int]] = {}
    for buffer, block in held.items():
        holders.setdefault(block, []).append(buffer)
    kept: dict[int, int] = {}

    def keep_if_held(lifetime: int) -> None:
        if candidates := holders.get(lifetimes[lifetime].block):
            kept[lifetime] = candidates.pop(0)

    staying = [number for number, lifetime in enumerate(lifetimes) if lifetime.stays and lifetime.block in holders]
    from_the_start = {number: lifetimes[number]._replace(first=0) for number in staying}
    # In the rest of a last step no resident returns. There may be too few buffers then to set one aside for each.
    if most_overlapping([from_the_start.get(number, lifetime) for number, lifetime in enumerate(lifetimes)]) <= buffers:
        for number in staying:
            keep_if_held(number)
    others = (number for number in range(len(lifetimes)) if number not in kept)
    for number in list(islice(others, buffers - len(kept))):
        keep_if_held(number)
    return kept


def _assign_buffers(
    lifetimes: Sequence[Lifetime], buffers: int, held: Mapping[int, BlockKey], kept: Mapping[int, int]
) -> tuple[list[int], list[Fetch], list[int]]:
    """Buffer of each tenancy, all fetches in bus order, and the index of each tenancy's fetch (or KEPT)."""
    taken = set(kept.values())
    # Empty buffers first: what a later run may still want is overwritten last.
    idle = deque(sorted((b for b in range(buffers) if b not in taken), key=lambda buffer: buffer in held))
    busy: list[tuple[int, int]] = []  # (visit after which it is free, buffer), a heap
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
        free_since, buffer = (AT_ONCE, idle.popleft()) if idle else heappop(busy)
        assert free_since < lifetime.first, "more tenancies overlap than there are buffers"
        heappush(busy, (lifetime.last, buffer))
        buffer_of.append(buffer)
        fetch_of.append(len(fetches))
        fetches.append(Fetch(lifetime.block, buffer, free_since, lifetime.first, lifetime.last))
    return buffer_of, fetches, fetch_of
