from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy, plan_residency, spread_evenly
from wanstream.schema.policy import spread_over_largest
from wanstream.tests.support.plan_fixtures import buffers_needed

WAN = {"high": 40, "low": 40}


@pytest.mark.parametrize(
    ("policy", "block_counts", "residents", "buffers"),
    [
        (OffloadPolicy.resident(), WAN, {"high": 40, "low": 40}, 80),
        (OffloadPolicy.resident(), {"high": 40, "low": 30}, {"high": 40, "low": 30}, 70),
        (OffloadPolicy.layerwise(), WAN, {"high": 0, "low": 0}, 2),
        (OffloadPolicy.layerwise(0), WAN, {"high": 0, "low": 0}, 1),
        (OffloadPolicy.layerwise(3), WAN, {"high": 0, "low": 0}, 4),
        (OffloadPolicy.layerwise(7), {"high": 2, "low": 3}, {"high": 0, "low": 0}, 5),
        (OffloadPolicy.layerwise(), {"encoder": 1}, {"encoder": 0}, 1),
        (OffloadPolicy.block_swap(), WAN, {"high": 20, "low": 20}, 22),
        (OffloadPolicy.block_swap(20, 2), WAN, {"high": 20, "low": 20}, 23),
        (OffloadPolicy.block_swap(40), WAN, {"high": 0, "low": 0}, 2),
        (OffloadPolicy.block_swap(0), WAN, {"high": 40, "low": 40}, 40),
        (OffloadPolicy.block_swap(1, 5), {"high": 4}, {"high": 3}, 4),
        (OffloadPolicy.block_swap(20), {"high": 40, "low": 30}, {"high": 20, "low": 10}, 22),
        (OffloadPolicy.block_swap(30), {"high": 40, "low": 30}, {"high": 10, "low": 0}, 12),
    ],
)
def test_residents_and_buffers_of_a_policy(
    policy: OffloadPolicy, block_counts: dict[str, int], residents: dict[str, int], buffers: int
) -> None:
    residency, found = plan_residency(policy, block_counts)
    assert {expert: len(blocks) for expert, blocks in residency.residents.items()} == residents
    assert found == buffers
    assert residency.permanent == (policy.kind == "resident")


@pytest.mark.parametrize(
    ("count", "blocks"),
    [(0, []), (1, [0]), (4, [0, 10, 20, 30]), (3, [0, 13, 26]), (40, list(range(40)))],
)
def test_residents_are_spread_evenly_from_block_0(count: int, blocks: list[int]) -> None:
    assert sorted(spread_evenly(count, 40)) == blocks


@given(blocks=st.integers(1, 200), data=st.data())
def test_gaps_between_residents_differ_by_one_at_most(blocks: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, blocks))
    residents = sorted(spread_evenly(count, blocks))
    gaps = [
        after - before for before, after in zip(residents, [*residents[1:], blocks], strict=True)
    ]
    assert len(residents) == count
    assert residents[0] == 0
    assert max(gaps) - min(gaps) <= 1


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
def test_residents_are_the_largest_blocks(count: int, sizes: list[int], blocks: set[int]) -> None:
    assert spread_over_largest(count, sizes) == blocks
    policy = OffloadPolicy.block_swap(len(sizes) - count)
    residency, buffers = plan_residency(policy, {"model": len(sizes)}, {"model": sizes})
    assert residency.residents == {"model": blocks}
    assert buffers == plan_residency(policy, {"model": len(sizes)})[1]


def test_a_pinned_first_block_is_resident_even_if_it_is_small() -> None:
    policy = replace(OffloadPolicy.block_swap(2), pin_first_block=True)
    residency, _ = plan_residency(policy, {"model": 4}, {"model": [1, 9, 9, 9]})
    assert 0 in residency.residents["model"]


@settings(deadline=None)
@given(
    block_counts=st.dictionaries(
        st.sampled_from(["high", "low", "encoder"]), st.integers(1, 12), min_size=1
    ),
    prefetch_blocks=st.integers(0, 5),
    data=st.data(),
)
def test_the_planned_buffers_are_enough_and_never_more_than_the_blocks(
    block_counts: dict[str, int], prefetch_blocks: int, data: st.DataObject
) -> None:
    swapped = data.draw(st.integers(0, min(block_counts.values())))
    steps = data.draw(st.lists(st.sampled_from(sorted(block_counts)), max_size=6))
    visits = step_visits(steps, block_counts)
    for policy in (
        OffloadPolicy.resident(),
        OffloadPolicy.layerwise(prefetch_blocks),
        OffloadPolicy.block_swap(swapped, prefetch_blocks),
    ):
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
def test_a_policy_with_impossible_settings_is_refused(
    values: dict[str, object], message: str
) -> None:
    settings_of_policy = {
        "kind": "block_swap",
        "prefetch_blocks": 1,
        "blocks_to_swap": 20,
        "source": "file",
        **values,
    }
    with pytest.raises(ValueError, match=message):
        OffloadPolicy(**settings_of_policy)


@pytest.mark.parametrize(
    ("policy", "block_counts", "message"),
    [
        (
            OffloadPolicy.block_swap(41),
            WAN,
            "blocks_to_swap is 41, but the high expert has only 40 blocks: use 40",
        ),
        (
            OffloadPolicy.block_swap(31),
            {"high": 40, "low": 30},
            "the low expert has only 30 blocks",
        ),
        (OffloadPolicy.layerwise(), {}, "block_counts is empty"),
        (OffloadPolicy.resident(), {"high": 40, "low": 0}, "stack 'low' has 0 blocks"),
    ],
)
def test_a_policy_that_does_not_fit_the_model_is_refused(
    policy: OffloadPolicy, block_counts: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_residency(policy, block_counts)


def test_policies_are_values() -> None:
    assert OffloadPolicy.layerwise(2, source="pinned") == OffloadPolicy.layerwise(
        prefetch_blocks=2, source="pinned"
    )
    assert (
        len(
            {
                OffloadPolicy.resident(),
                OffloadPolicy.resident(),
                OffloadPolicy.resident(source="pinned"),
            }
        )
        == 2
    )


@pytest.mark.parametrize(
    ("policy", "residents", "buffers"),
    [
        (OffloadPolicy.layerwise(1), {0}, 3),
        (OffloadPolicy.layerwise(0), {0}, 2),
        (OffloadPolicy.block_swap(8, 1), {0}, 3),
        (OffloadPolicy.block_swap(4, 1), {0, 2, 4, 6}, 6),
        (OffloadPolicy.block_swap(0, 1), set(range(8)), 8),
    ],
    ids=str,
)
def test_a_cache_keeps_the_first_block(
    policy: OffloadPolicy, residents: set[int], buffers: int
) -> None:
    residency, count = plan_residency(replace(policy, pin_first_block=True), {"high": 8, "low": 8})
    assert residency.residents["high"] == residency.residents["low"] == residents
    assert count == buffers
