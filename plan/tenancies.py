"""Tenancies: for which spans of visits a block stays in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .residency import Residency
from .visits import BlockKey, Visit


class Tenancy(NamedTuple):
    """One block in one buffer from visit `first` to visit `last`, both included.

    `stays` marks residents of the first stage and permanent ones: worth keeping if they are there at the start.
    """

    block: BlockKey
    first: int
    last: int
    stays: bool


class TenancyList(NamedTuple):
    """Tenancies in order of their first visit, and for each visit the index of the tenancy that serves it."""

    tenancies: tuple[Tenancy, ...]
    of_visit: tuple[int, ...]


def list_tenancies(visits: Sequence[Visit], residency: Residency) -> TenancyList:
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
        tenancy = staying.get(key)
        if tenancy is None:
            tenancy = len(opened)
            resident = residency.keeps(visit.expert, visit.block)
            opened.append((key, index, resident and (first_stage or residency.permanent)))
            last.append(index)
            if resident:
                staying[key] = tenancy
        last[tenancy] = index
        of_visit.append(tenancy)
    tenancies = (Tenancy(key, first, end, stays) for (key, first, stays), end in zip(opened, last, strict=True))
    return TenancyList(tuple(tenancies), tuple(of_visit))


def buffers_needed(visits: Sequence[Visit], residency: Residency) -> int:
    """Smallest number of buffers with which `visits` can run: the most tenancies that ever overlap."""
    return most_overlapping(list_tenancies(visits, residency).tenancies)


def most_overlapping(tenancies: Sequence[Tenancy]) -> int:
    """Largest number of `tenancies` that hold a buffer during the same visit."""
    change = [0] * (max((tenancy.last for tenancy in tenancies), default=0) + 2)
    for tenancy in tenancies:
        change[tenancy.first] += 1
        change[tenancy.last + 1] -= 1
    return max(accumulate(change))
