"""Plan of machines: one machine per group where it fits, consecutive ranks on each machine."""

import random
from itertools import pairwise

import pytest

from wanstream.distributed.plan.machines import RankPart, nested_sizes, order_groups, plan_machines
from wanstream.schema import Mesh


@pytest.mark.parametrize(
    ("free", "count", "sizes", "parts"),
    [
        ([8], 8, [4], [(4, 0), (4, 0)]),
        ([3, 5], 8, [4], [(4, 1), (4, None)]),
        ([3, 5], 6, [3], [(3, 1), (3, 0)]),
        ([5, 3], 8, [2], [(2, 0), (2, 0), (2, 1), (2, None)]),
        ([5, 3], 8, [8, 4], [(4, 0), (4, None)]),
        ([5, 3], 8, [8, 4, 2], [(4, 0), (2, 1), (2, None)]),
        ([2, 2], 4, [1], [(1, 0), (1, 0), (1, 1), (1, 1)]),
        ([4], 5, [2], [(2, 0), (2, 0), (1, None)]),
        ([1, 1], 4, [2], [(2, None), (2, None)]),
        ([], 1, [1], [(1, None)]),
    ],
)
def test_groups_are_on_one_machine_where_they_fit(free, count, sizes, parts):
    found, _ = planned(free, count, *sizes)
    assert [(len(part.ranks), part.machine) for part in found] == parts


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        (Mesh(), (1,)),
        (Mesh(data=2, cfg=2), (2,)),
        (Mesh(cfg=2, ulysses=4), (8, 4)),
        (Mesh(stage=2, cfg=2, ring=2, ulysses=2), (8, 4, 2)),
    ],
    ids=str,
)
def test_sizes_of_groups(mesh, sizes):
    assert nested_sizes(mesh) == sizes


def planned(free: list[int], count: int, *sizes: int) -> tuple[list[RankPart], list[int]]:
    """Return the parts in rank order and the free slots left on every machine."""
    parts = sorted(plan_machines(free, count, sizes), key=lambda part: part.ranks.start)
    assert [rank for part in parts for rank in part.ranks] == list(range(count))
    left = [*free]
    for part in parts:
        if part.machine is not None:
            left[part.machine] -= len(part.ranks)
    assert min(left, default=0) >= 0
    return parts, left


def test_most_groups_are_on_one_machine():
    chance = random.Random(0)
    for _ in range(2000):
        free = [chance.randint(0, 9) for _ in range(chance.randint(1, 6))]
        size = chance.choice([1, 2, 3, 4, 6, 8])
        groups = chance.randint(1, 8)
        parts, _ = planned(free, groups * size, size)
        visited = [part.machine for part in parts if part.machine is not None]
        fitting = min(groups, sum(slots // size for slots in free))
        assert len(visited) == fitting, (free, size, groups)
        assert all(part.ranks.start % size == 0 and len(part.ranks) == size for part in parts)
        changes = sum(one != other for one, other in pairwise(visited))
        assert changes == max(len(set(visited)) - 1, 0), "ranks of a machine are consecutive"


def test_workers_that_share_tokens_are_on_one_machine():
    chance = random.Random(1)
    for _ in range(1000):
        tokens = chance.choice([2, 4])
        cell = 2 * tokens
        free = [chance.randint(0, 9) for _ in range(chance.randint(1, 5))]
        groups = chance.randint(1, 4)
        parts, left = planned(free, groups * cell, cell, tokens)
        whole = sum(part.machine is not None and len(part.ranks) == cell for part in parts)
        assert whole == min(groups, sum(slots // cell for slots in free))
        # No part without a machine has room on one.
        assert max(left) < tokens or all(part.machine is not None for part in parts)


@pytest.mark.parametrize(
    ("machines", "size", "ordered"),
    [
        ("AAAABBAB", 2, "AAAAABBB"),
        ("AAAAABBB", 4, "AAAAABBB"),
        ("AABBCCAC", 2, "AAACBBCC"),
        ("BBAA", 2, "BBAA"),
        ("ABAB", 1, "AABB"),
        ("AABBA", 2, "AABBA"),
        ("", 3, ""),
    ],
)
def test_groups_with_a_machine_in_common_are_neighbours(machines, size, ordered):
    order = order_groups(machines, size)
    assert sorted(order) == list(range(len(machines)))
    assert "".join(machines[rank] for rank in order) == ordered
    firsts = range(0, len(machines), size)
    groups = {tuple(order[first : first + size]) for first in firsts}
    assert {each for each in groups if len(each) == size} <= {
        tuple(range(first, first + size)) for first in firsts
    }
