"""Eviction order."""

from __future__ import annotations

from wanstream.plan.programs import BlockKey, eviction_order
from wanstream.schema import OffloadPolicy, Residency, plan_residency

COUNTS = {"high": 4, "low": 4}


def order(
    contents: dict[int, tuple[str, int]], residency: Residency, buffers: int
) -> tuple[int, ...]:
    return eviction_order(
        range(buffers), {b: BlockKey(*block) for b, block in contents.items()}, residency
    )


def test_empty_then_streamed_then_resident():
    residency, _ = plan_residency(OffloadPolicy.block_swap(2, 1), COUNTS)  # residents: 0 and 2
    contents = {0: ("high", 0), 1: ("high", 1), 2: ("high", 2), 4: ("high", 3)}
    assert order(contents, residency, 5) == (3, 4, 1, 2, 0)


def test_the_block_visited_last_is_evicted_first():
    residency, _ = plan_residency(OffloadPolicy.resident(), COUNTS)
    contents = {0: ("low", 0), 1: ("high", 3), 2: ("low", 3), 3: ("high", 0)}
    assert order(contents, residency, 4) == (2, 0, 1, 3)


def test_of_two_copies_each_buffer_goes_once():
    residency, _ = plan_residency(OffloadPolicy.layerwise(1), COUNTS)
    assert sorted(order({0: ("high", 1), 1: ("high", 1)}, residency, 3)) == [0, 1, 2]


def test_nothing_is_known_of_a_stack_without_residency():
    assert order({0: ("text", 1), 1: ("text", 2)}, Residency(residents={}), 2) == (1, 0)
