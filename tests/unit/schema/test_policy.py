from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy, plan_residency, spread_evenly
from wanstream.schema.policy import spread_over_largest
from wanstream.tests.support.plan_fixtures import buffers_needed

WAN = {"high": 40, "low": 40}
UNEVEN = {"high": 40, "low": 30}
RESIDENT = OffloadPolicy.resident
LAYERWISE = OffloadPolicy.layerwise
BLOCK_SWAP = OffloadPolicy.block_swap


@pytest.mark.parametrize(
    ("policy", "block_counts", "residents", "buffers"),
    [
        (RESIDENT(), UNEVEN, [40, 30], 70),
        (LAYERWISE(0), WAN, [0, 0], 1),
        (LAYERWISE(), WAN, [0, 0], 2),
        (LAYERWISE(7), {"high": 2, "low": 3}, [0, 0], 5),
        (LAYERWISE(), {"encoder": 1}, [0], 1),
        (BLOCK_SWAP(), WAN, [20, 20], 22),
        (BLOCK_SWAP(20, 2), WAN, [20, 20], 23),
        (BLOCK_SWAP(40), WAN, [0, 0], 2),
        (BLOCK_SWAP(0), WAN, [40, 40], 40),
        (BLOCK_SWAP(1, 5), {"high": 4}, [3], 4),
        (BLOCK_SWAP(20), UNEVEN, [20, 10], 22),
        (BLOCK_SWAP(30), UNEVEN, [10, 0], 12),
    ],
)
def test_residents_and_buffers_of_a_policy(policy, block_counts, residents, buffers):
    residency, found = plan_residency(policy, block_counts)
    assert [len(residency.residents[expert]) for expert in block_counts] == residents
    assert found == buffers
    assert residency.permanent == (policy.kind == "resident")


@given(blocks=st.integers(1, 200), data=st.data())
def test_gaps_between_residents_differ_by_one_at_most(blocks, data):
    count = data.draw(st.integers(1, blocks))
    residents = sorted(spread_evenly(count, blocks))
    gaps = [after - before for before, after in pairwise([*residents, blocks])]
    assert len(residents) == count
    assert residents[0] == 0
    assert max(gaps) - min(gaps) <= 1
    assert sorted(spread_evenly(4, 40)) == [0, 10, 20, 30]
    assert spread_evenly(0, blocks) == frozenset()


@pytest.mark.parametrize(
    ("count", "sizes", "blocks"),
    [
        (2, [10, 10, 10, 10], {0, 2}),
        (2, [10, 10, 10, 10, 4, 4, 4, 4], {0, 2}),
        (6, [10, 10, 10, 10, 4, 4, 4, 4], {0, 1, 2, 3, 4, 6}),
        (1, [4, 10, 4], {1}),
        (2, [8, 10, 8, 10], {0, 2}),  # alike
        (3, [1, 2, 4], {0, 1, 2}),
        (0, [1, 2], set()),
    ],
)
def test_residents_are_the_largest_blocks(count, sizes, blocks):
    assert spread_over_largest(count, sizes) == blocks
    policy = BLOCK_SWAP(len(sizes) - count)
    residency, buffers = plan_residency(policy, {"model": len(sizes)}, {"model": sizes})
    assert residency.residents == {"model": blocks}
    assert buffers == plan_residency(policy, {"model": len(sizes)})[1]


NAMES = st.sampled_from(["high", "low", "encoder"])
COUNTS = st.dictionaries(NAMES, st.integers(1, 12), min_size=1)


@given(block_counts=COUNTS, prefetch_blocks=st.integers(0, 5), data=st.data())
def test_planned_buffers_are_enough_and_at_most_the_blocks(block_counts, prefetch_blocks, data):
    swapped = data.draw(st.integers(0, min(block_counts.values())))
    steps = data.draw(st.lists(st.sampled_from(sorted(block_counts)), max_size=6))
    visits = step_visits(steps, block_counts)
    for policy in (RESIDENT(), LAYERWISE(prefetch_blocks), BLOCK_SWAP(swapped, prefetch_blocks)):
        residency, buffers = plan_residency(policy, block_counts)
        assert buffers_needed(visits, residency) <= buffers <= sum(block_counts.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "magic"}, "kind is 'magic', choose one of"),
        ({"source": "cloud"}, "source is 'cloud', choose one of"),
        ({"prefetch_blocks": -1}, "prefetch_blocks is -1, it must be 0 or more"),
        ({"blocks_to_swap": -2}, "blocks_to_swap is -2, it must be 0 or more"),
        ({"source": "pinned", "ram_blocks": -1}, "ram_blocks is -1, it must be 0 or more"),
        ({"ram_blocks": 12}, "ram_blocks is 12, but source is 'file': use source 'pinned'"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0, it must be 1 or more"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        replace(BLOCK_SWAP(20, 1), **values)


@pytest.mark.parametrize(
    ("policy", "block_counts", "message"),
    [
        (BLOCK_SWAP(41), WAN, "is 41, but the high expert has only 40 blocks: use 40"),
        (BLOCK_SWAP(31), UNEVEN, "the low expert has only 30 blocks"),
        (LAYERWISE(), {}, "block_counts is empty"),
        (RESIDENT(), {"high": 40, "low": 0}, "stack 'low' has 0 blocks"),
    ],
)
def test_policy_that_does_not_fit_the_model_is_refused(policy, block_counts, message):
    with pytest.raises(ValueError, match=message):
        plan_residency(policy, block_counts)


BUFFERS = [(LAYERWISE(1), {0}, 3), (LAYERWISE(0), {0}, 2), (BLOCK_SWAP(8, 1), {0}, 3)]
BUFFERS += [(BLOCK_SWAP(4, 1), {0, 2, 4, 6}, 6), (BLOCK_SWAP(0, 1), set(range(8)), 8)]


@pytest.mark.parametrize(("policy", "residents", "buffers"), BUFFERS, ids=str)
def test_cache_keeps_the_first_block(policy, residents, buffers):
    """Also if it is small."""
    residency, count = plan_residency(replace(policy, pin_first_block=True), {"high": 8, "low": 8})
    assert residency.residents["high"] == residency.residents["low"] == residents
    assert count == buffers
    pinned = replace(BLOCK_SWAP(2), pin_first_block=True)
    residency, _ = plan_residency(pinned, {"model": 4}, {"model": [1, 9, 9, 9]})
    assert 0 in residency.residents["model"]
