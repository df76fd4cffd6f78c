"""Policies shrunk to fit into less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.plan import keep_near_policy, shrink_to_budget
from wanstream.schema import OffloadPolicy, plan_residency

COUNTS = {"high": 40, "low": 40}
OUTSIDE = 10
"""Bytes outside streaming. A buffer takes 1."""

RESIDENT, BLOCK_SWAP, LAYERWISE = (
    OffloadPolicy.resident,
    OffloadPolicy.block_swap,
    OffloadPolicy.layerwise,
)


def _bytes(policy: OffloadPolicy) -> int:
    return OUTSIDE + plan_residency(policy, COUNTS)[1]


def _fit(policy: OffloadPolicy, buffers: float) -> OffloadPolicy:
    return shrink_to_budget(policy, COUNTS, budget=OUTSIDE + buffers, device_bytes=_bytes)


@pytest.mark.parametrize(
    ("requested", "buffers", "fitted"),
    [
        (BLOCK_SWAP(20), 1e32, BLOCK_SWAP(20)),
        (BLOCK_SWAP(20), 22, BLOCK_SWAP(20)),
        (BLOCK_SWAP(20), 21.9, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), 7, BLOCK_SWAP(35)),
        (BLOCK_SWAP(20), 3, BLOCK_SWAP(39)),
        (BLOCK_SWAP(20), 2, LAYERWISE(1)),
        (BLOCK_SWAP(20), 0.1 - OUTSIDE, LAYERWISE(1)),
        (BLOCK_SWAP(20, 4), 6, BLOCK_SWAP(39, 4)),
        (BLOCK_SWAP(20, 4), 4, LAYERWISE(3)),
        (BLOCK_SWAP(20, 0), 1, LAYERWISE(0)),
        # Forty resident blocks need no buffer beyond their own, so they take less than 38 with
        # three ahead.
        (BLOCK_SWAP(2, 3), 41, BLOCK_SWAP(0, 3)),
        (RESIDENT(), 80, RESIDENT()),
        (RESIDENT(), 79, BLOCK_SWAP(0)),
        (RESIDENT(), 39, BLOCK_SWAP(3)),
        (RESIDENT(), 0, LAYERWISE(1)),
        (LAYERWISE(3), 3, LAYERWISE(2)),
        (LAYERWISE(1), 0, LAYERWISE(1)),
        (LAYERWISE(0), 0, LAYERWISE(0)),
        (BLOCK_SWAP(20, source="pinned"), 3, BLOCK_SWAP(39, source="pinned")),
        (LAYERWISE(3, source="pinned"), 2, LAYERWISE(1, source="pinned")),
    ],
)
def test_fitted_policies(requested: OffloadPolicy, buffers: float, fitted: OffloadPolicy) -> None:
    assert _fit(requested, buffers) == fitted


POLICIES = st.one_of(
    st.just(RESIDENT()),
    st.builds(BLOCK_SWAP, st.integers(0, 40), st.integers(0, 6)),
    st.builds(LAYERWISE, st.integers(0, 6)),
)


def _residents(policy: OffloadPolicy) -> int:
    return len(plan_residency(policy, COUNTS)[0].residents["high"])


@given(POLICIES, st.integers(0, 90))
def test_a_policy_fits_unless_none_can(requested: OffloadPolicy, buffers: int) -> None:
    fitted = _fit(requested, buffers)
    fewest = 1 if requested.prefetch_blocks == 0 and requested.kind != "resident" else 2
    assert _bytes(fitted) <= OUTSIDE + max(buffers, fewest)
    assert _bytes(fitted) >= OUTSIDE + min(fewest, _bytes(requested) - OUTSIDE)


@given(POLICIES, st.integers(0, 90))
def test_more_memory_keeps_at_least_as_many_of_the_requested_residents(
    requested: OffloadPolicy, buffers: int
) -> None:
    """More residents than requested are possible: forty residents need no streaming buffer."""
    less, more = (_residents(_fit(requested, count)) for count in (buffers, buffers + 1))
    assert min(less, _residents(requested)) <= more


@given(POLICIES, st.integers(0, 90))
def test_ram_and_token_settings_do_not_change(requested: OffloadPolicy, buffers: int) -> None:
    in_ram = {"source": "pinned", "ram_blocks": 7, "chunk_tokens": 4096}
    assert _fit(replace(requested, **in_ram), buffers) == replace(
        _fit(requested, buffers), **in_ram
    )


@given(POLICIES, st.integers(0, 90))
def test_a_fitted_policy_fits_again(requested: OffloadPolicy, buffers: int) -> None:
    fitted = _fit(requested, buffers)
    assert _fit(fitted, buffers) == fitted


@pytest.mark.parametrize(
    ("present", "buffers", "kept"),
    [
        (BLOCK_SWAP(30), 13.0, BLOCK_SWAP(30)),
        (BLOCK_SWAP(30), 13.9, BLOCK_SWAP(30)),
        (BLOCK_SWAP(30), 14.0, BLOCK_SWAP(28)),
        (BLOCK_SWAP(30), 11.9, BLOCK_SWAP(31)),
        (BLOCK_SWAP(21), 1e32, BLOCK_SWAP(21)),
        (BLOCK_SWAP(22), 1e32, BLOCK_SWAP(20)),
        (LAYERWISE(1), 3.5, LAYERWISE(1)),
        (LAYERWISE(1), 4.0, BLOCK_SWAP(38)),
        # The present policy takes more than the requested one.
        (BLOCK_SWAP(10), 1e32, BLOCK_SWAP(20)),
    ],
)
def test_the_present_policy_is_kept_until_two_more_blocks_fit(
    present: OffloadPolicy, buffers: float, kept: OffloadPolicy
) -> None:
    fitted = _fit(BLOCK_SWAP(20), buffers)
    assert keep_near_policy(present, fitted, budget=OUTSIDE + buffers, device_bytes=_bytes) == kept


@pytest.mark.parametrize(
    "change", [{"ram_blocks": 8}, {"chunk_tokens": 512}, {"ram_blocks": None}], ids=str
)
def test_policies_with_other_ram_or_token_settings_are_not_near(change: dict[str, int]) -> None:
    present = replace(BLOCK_SWAP(30), source="pinned", ram_blocks=7)
    fitted = replace(BLOCK_SWAP(30), **{"source": "pinned", "ram_blocks": 7, **change})
    assert keep_near_policy(present, fitted, budget=1e32, device_bytes=_bytes) == fitted
    assert keep_near_policy(present, present, budget=1e32, device_bytes=_bytes) == present
    neighbour = replace(present, blocks_to_swap=29)
    assert keep_near_policy(present, neighbour, budget=1e32, device_bytes=_bytes) == present
