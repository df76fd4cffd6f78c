"""Transfer program: block lifetimes, buffers, and all fetches, compiled before the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple

from ...schema import Residency
from .buffer_sizes import BufferPool, BufferSizes
from .visits import BlockKey, Visit


class Lifetime(NamedTuple):
    """Live range for one block in one buffer, from visit `first` to visit `last`, both included."""

    block: BlockKey
    first: int
    last: int
    resident: bool
    resident_first: bool
    """True for residents in the first stage and permanent ones. They are kept first if already
    loaded."""


def list_lifetimes(
    visits: Sequence[Visit], residency: Residency
) -> tuple[list[Lifetime], list[int]]:
    """Return the lifetimes in order of first visit, and the lifetime index for each visit.

    A streamed block has one lifetime per visit, and a resident block one per stage.

    A permanent resident has one lifetime in the whole run, or one for each patch change.
    """
    lifetimes: list[Lifetime] = []
    of_visit: list[int] = []
    resident_lifetimes: dict[BlockKey, int] = {}
    first_stage = True
    for index, visit in enumerate(visits):
        # The first visit is compared with itself: it changes nothing.
        before = visits[max(0, index - 1)]
        if (visit.expert, visit.patch) != (before.expert, before.patch):
            first_stage = False
            if not residency.permanent:
                resident_lifetimes.clear()
        key = visit.key
        lifetime = resident_lifetimes.get(key.stored)
        if lifetime is None or lifetimes[lifetime].block != key:
            lifetime = len(lifetimes)
            resident = residency.keeps(*key)
            is_first = resident and (first_stage or residency.permanent)
            lifetimes.append(Lifetime(key, index, index, resident, is_first))
            if resident:
                resident_lifetimes[key.stored] = lifetime
        else:
            lifetimes[lifetime] = lifetimes[lifetime]._replace(last=index)
        of_visit.append(lifetime)
    return lifetimes, of_visit


def max_overlap(lifetimes: Sequence[Lifetime]) -> int:
    """Return the largest number of `lifetimes` with a visit in common."""
    change = [0] * (max((lifetime.last for lifetime in lifetimes), default=0) + 2)
    for lifetime in lifetimes:
        change[lifetime.first] += 1
        # `last` is included, so the count falls one visit later.
        change[lifetime.last + 1] -= 1
    return max(accumulate(change))


IMMEDIATE = -1
"""`start_after` when a fetch waits for no visit in the program."""

KEPT = -1
"""`visit_fetch` when a visit's block was in the buffer before the program."""


class ProgramError(ValueError):
    """Transfer program that cannot be compiled, or would read a wrong block."""


class Fetch(NamedTuple):
    """Transfer of one block into one buffer.

    It may start when visit `start_after` is done (`IMMEDIATE`: immediately) and must be complete
    before visit `needed_by`. The buffer is free again when visit `last` is done. All three are
    indices into the program's visits.
    """

    block: BlockKey
    buffer: int
    start_after: int
    needed_by: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TransferProgram:
    """Visits in a run and their fetches, executed by the engine and predicted by `simulate`."""

    visits: tuple[Visit, ...]
    fetches: tuple[Fetch, ...]
    """Fetches in bus order. A single copy queue in this order cannot deadlock."""
    buffers: int
    """Buffer count."""
    sizes: BufferSizes | None
    """Buffer sizes. None: each block fits into each buffer."""
    visit_buffer: tuple[int, ...]
    """For each visit: the buffer used."""
    visit_fetch: tuple[int, ...]
    """For each visit: index of the block's fetch, or `KEPT`."""
    initial: Mapping[int, BlockKey]
    """Earlier buffer contents used by visits in this program."""
    untouched: Mapping[int, BlockKey]
    """Earlier contents in buffers not touched by this program."""

    @property
    def kept_until(self) -> dict[int, int]:
        """Last visit to the earlier contents of each buffer in `initial`."""
        at = zip(self.visit_buffer, range(len(self.visits)), self.visit_fetch, strict=True)
        return {buffer: visit for buffer, visit, fetch in at if fetch == KEPT}

    @cached_property
    def last_use(self) -> frozenset[int]:
        """Visits with a buffer that is free afterwards."""
        return frozenset(self.kept_until.values()).union(fetch.last for fetch in self.fetches)


def compile_program(
    visits: Sequence[Visit],
    residency: Residency,
    buffers: int,
    *,
    sizes: BufferSizes | None = None,
    contents: Mapping[int, BlockKey] | None = None,
    apart: int | None = None,
) -> TransferProgram:
    """Assign a buffer to every visit and a fetch to every missing block.

    Args:
        visits: visits in the run, in order.
        residency: resident blocks per expert.
        buffers: number of buffers.
        sizes: buffer sizes. None: each block fits into each buffer.
        contents: buffer contents before the program (buffer -> block). It includes every *issued*
            fetch, complete or not. The caller must wait for all visits in the earlier program.
            Buffers from number `buffers` on are ignored.
        apart: number of buffers, from the first on, reserved for residents, which use no others.
            None: all blocks share all buffers.

    Raises:
        ProgramError: if there are too few buffers, or too few in a size. The message has the number
            needed.
    """
    visits = tuple(visits)
    lifetimes, of_visit = list_lifetimes(visits, residency)
    pools = [(0, buffers, lifetimes)]
    if apart is not None:
        of_residents = [each for each in lifetimes if each.resident]
        others = [each for each in lifetimes if not each.resident]
        pools = [(0, apart, of_residents), (apart, buffers - apart, others)]
    fetches: list[Fetch] = []
    buffer_at: dict[int, int] = {}  # by the first visit of a lifetime
    initial: dict[int, BlockKey] = {}
    before: dict[int, BlockKey] = {}
    for start, count, lived in pools:
        pool = BufferPool(range(start, start + count), sizes)
        is_resident = {each.block: each.resident for each in lived}
        levels_of = {key: pool.levels_for(key, resident=is_resident[key]) for key in is_resident}
        levels = [levels_of[each.block] for each in lived]
        if (shortage := _shortage(lived, levels, pool)) is not None:
            raise ProgramError(shortage)
        # Contents are sorted: equal contents must give equal programs, in whatever order they came.
        loaded = {
            buffer: key
            for buffer, key in sorted((contents or {}).items())
            if buffer in pool.numbers
        }
        kept = _kept_lifetimes(lived, levels, pool, loaded)
        buffer_at |= {lived[number].first: buffer for number, buffer in kept.items()}
        initial |= {buffer: lived[number].block for number, buffer in kept.items()}
        fetches += _fetches(lived, levels, pool, loaded, kept)
        before |= loaded
    # Each fetch is needed by a different visit, so the bus order is unambiguous.
    fetches.sort(key=lambda fetch: fetch.needed_by)
    fetch_at = {fetch.needed_by: number for number, fetch in enumerate(fetches)}
    buffer_at |= {fetch.needed_by: fetch.buffer for fetch in fetches}
    used = initial.keys() | {fetch.buffer for fetch in fetches}
    firsts = [lifetimes[lifetime].first for lifetime in of_visit]
    return TransferProgram(
        visits=visits,
        fetches=tuple(fetches),
        buffers=buffers,
        sizes=sizes,
        visit_buffer=tuple(buffer_at[first] for first in firsts),
        visit_fetch=tuple(fetch_at.get(first, KEPT) for first in firsts),
        initial=initial,
        untouched={buffer: block for buffer, block in before.items() if buffer not in used},
    )


def _shortage(
    lifetimes: Sequence[Lifetime], levels: Sequence[range], pool: BufferPool
) -> str | None:
    """Return why lifetimes find no buffer. None if `_fetches` finds one for each.

    Streamed blocks are visited one at a time. Each finds a buffer if there are more buffers large
    enough for it than residents in them. Each resident finds one if there are as many buffers in
    this size as residents.
    """
    counts = pool.counts
    needed = max_overlap(lifetimes)
    if pool.size < needed:
        return f"{pool.size} buffers are too few: these residents and visits need {needed}"
    # With one size, the test above covers all.
    for level in range(len(counts) if len(counts) > 1 else 0):
        large = [at for at, allowed in enumerate(levels) if allowed.start >= level]
        same = [at for at in large if lifetimes[at].resident and levels[at].start == level]
        for numbers, has in ((large, sum(counts[level:])), (same, counts[level])):
            needed = max_overlap([lifetimes[at] for at in numbers])
            if has < needed:
                return f"{has} buffers of a size are too few: residents and visits need {needed}"
    unfit = (each.block for each, allowed in zip(lifetimes, levels, strict=True) if not allowed)
    return next((f"no buffer has the size of {block}" for block in unfit), None)


def _kept_lifetimes(
    lifetimes: Sequence[Lifetime],
    levels: Sequence[range],
    pool: BufferPool,
    loaded: Mapping[int, BlockKey],
) -> dict[int, int]:
    """Return the lifetimes without a fetch, because a buffer has their block (lifetime -> buffer).

    Residents in the first stage are kept first. The remaining buffers serve the next lifetimes in
    order, and loaded ones among these are kept too. Keeping more would take buffers from blocks
    needed earlier.
    """
    buffers_of: dict[BlockKey, list[int]] = {}
    for buffer, block in loaded.items():
        buffers_of.setdefault(block, []).append(buffer)
    spare = pool.counts
    kept: dict[int, int] = {}

    def keep_if_loaded(lifetime: int) -> bool:
        candidates = buffers_of.get(lifetimes[lifetime].block, [])
        for buffer in candidates:
            level = pool.level_of[buffer]
            if level in levels[lifetime] and spare[level]:
                spare[level] -= 1
                kept[lifetime] = buffer
                candidates.remove(buffer)
                return True
        return False

    for number in _loaded_residents(lifetimes, levels, pool, buffers_of):
        keep_if_loaded(number)
    for number, allowed in enumerate(levels):
        if number in kept or keep_if_loaded(number):
            continue
        level = next((level for level in allowed if spare[level]), None)
        if level is None:
            break
        spare[level] -= 1
    return kept


def _loaded_residents(
    lifetimes: Sequence[Lifetime],
    levels: Sequence[range],
    pool: BufferPool,
    loaded: Collection[BlockKey],
) -> Collection[int]:
    """Return the lifetimes of residents allowed to stay in their buffers from the start."""
    # A permanent resident whose patch returns has a lifetime before and one after.
    first_of: dict[BlockKey, int] = {}
    for number, lifetime in enumerate(lifetimes):
        if lifetime.resident_first and lifetime.block in loaded:
            first_of.setdefault(lifetime.block, number)
    residents = first_of.values()
    # A kept resident occupies a buffer from the start, not only from its first visit. In the rest
    # of a last step each resident is visited only once, and the program may have too few buffers
    # for that.
    from_the_start = {number: lifetimes[number]._replace(first=0) for number in residents}
    occupied = [from_the_start.get(number, lifetime) for number, lifetime in enumerate(lifetimes)]
    return residents if _shortage(occupied, levels, pool) is None else ()


def _fetches(
    lifetimes: Sequence[Lifetime],
    levels: Sequence[range],
    pool: BufferPool,
    loaded: Mapping[int, BlockKey],
    kept: Mapping[int, int],
) -> Iterator[Fetch]:
    """Yield the fetches for all lifetimes except kept ones, in bus order.

    Lifetimes are taken in order of first visit. Each gets the allowed buffer that has been free
    longest, and among equals the smallest.
    """
    kept_until = {buffer: lifetimes[number].last for number, buffer in kept.items()}
    free: list[list[tuple[int, bool, int]]] = [[] for _ in pool.counts]
    for buffer in pool.numbers:
        # Empty buffers first: contents that a later run may use are overwritten last.
        since = (kept_until.get(buffer, IMMEDIATE), buffer in loaded, buffer)
        free[pool.level_of[buffer]].append(since)
    for heap in free:
        heapify(heap)
    for number, (lifetime, allowed) in enumerate(zip(lifetimes, levels, strict=True)):
        if number in kept:
            continue
        level = allowed.start
        if len(allowed) > 1:
            # Each heap has the buffer free for longest on top, so only the tops are compared.
            level = min(allowed, key=lambda level: free[level][0][0])
        free_since, _, buffer = free[level][0]
        assert free_since < lifetime.first, "more lifetimes overlap than there are buffers"
        heapreplace(free[level], (lifetime.last, False, buffer))
        yield Fetch(lifetime.block, buffer, free_since, lifetime.first, lifetime.last)


def eviction_order(
    buffers: Iterable[int], contents: Mapping[int, BlockKey], residency: Residency
) -> tuple[int, ...]:
    """Return `buffers` in eviction order, the least useful first.

    Empty buffers come first, then streamed blocks, then residents. Within each kind the block
    visited last in the next run comes first, because there is the most time to fetch it again.
    """
    experts = {expert: number for number, expert in enumerate(residency.residents)}

    def usefulness(buffer: int) -> tuple[int, int, int]:
        block = contents.get(buffer)
        if block is None:
            return (0, 0, -buffer)
        # Negative, so that late experts and late blocks come first.
        return (1 + residency.keeps(*block), -experts.get(block.expert, len(experts)), -block.block)

    return tuple(sorted(buffers, key=usefulness))
