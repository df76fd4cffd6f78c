"""Tenancies: for which spans of visits a block stays in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .residency import Residency
from .visits import BlockKey, Visit


class Tenancy(NamedTuple):
    """One block in one buffer from visit `first` to visit `last`, both included.

    `stage` counts the maximal runs of visits of one expert, from 0; a permanent resident has that of its first visit.
    """

    block: BlockKey
    first: int
    last: int
    stage: int
    resident: bool


class TenancyList(NamedTuple):
    """Tenancies in order of their first visit, and for each visit the index of the tenancy that serves it."""

    tenancies: tuple[Tenancy, ...]
    of_visit: tuple[int, ...]


def list_tenancies(visits: Sequence[Visit], residency: Residency) -> TenancyList:
    """A streamed block has one tenancy per visit; a resident one per stage, or one in all if permanent."""
    blocks: list[tuple[BlockKey, int, int, bool]] = []
    last: list[int] = []
    of_visit: list[int] = []
    staying: dict[BlockKey, int] = {}
    stage = 0
    for index, visit in enumerate(visits):
        if index and visit.expert != visits[index - 1].expert:
            stage += 1
            if not residency.permanent:
                staying.clear()
        key = visit.key
        tenancy = staying.get(key)
        if tenancy is None:
            tenancy = len(blocks)
            resident = residency.keeps(visit.expert, visit.block)
            blocks.append((key, index, stage, resident))
            last.append(index)
            if resident:
                staying[key] = tenancy
        last[tenancy] = index
        of_visit.append(tenancy)
    return TenancyList(
        tuple(Tenancy(key, first, end, at, stays) for (key, first, at, stays), end in zip(blocks, last, strict=True)),
        tuple(of_visit),
    )


def buffers_needed(visits: Sequence[Visit], residency: Residency) -> int:
    """Smallest number of buffers with which `visits` can run: the most tenancies that ever overlap."""
    return most_overlapping(list_tenancies(visits, residency).tenancies, len(visits))


def most_overlapping(tenancies: Sequence[Tenancy], visits: int) -> int:
    """Largest number of `tenancies` that hold a buffer during the same one of `visits` visits."""
    change = [0] * (visits + 1)
    for tenancy in tenancies:
        change[tenancy.first] += 1
        change[tenancy.last + 1] -= 1
    return max(accumulate(change))
