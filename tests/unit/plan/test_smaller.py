"""The next smaller policy after an out-of-memory error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.plan.shrink import bytes_to_free, next_smaller_policy
from wanstream.schema import OffloadPolicy, plan_residency
from wanstream.shapes import chunks_below

COUNTS = {"high": 40, "low": 40}
RESIDENT, BLOCK_SWAP, LAYERWISE = (
    OffloadPolicy.resident,
    OffloadPolicy.block_swap,
    OffloadPolicy.layerwise,
)


def _bytes(policy: OffloadPolicy) -> int:
    return 10 + plan_residency(policy, COUNTS)[1]


def _smaller(
    policy: OffloadPolicy, missing: float = 1, tokens: int = 75_600
) -> OffloadPolicy | None:
    return next_smaller_policy(
        policy, COUNTS, missing=missing, chunks=chunks_below(tokens), device_bytes=_bytes
    )


@pytest.mark.parametrize(
    ("policy", "missing", "expected"),
    [
        (RESIDENT(), 1, BLOCK_SWAP(0)),
        (RESIDENT(), 50, BLOCK_SWAP(12)),
        (BLOCK_SWAP(0), 1, BLOCK_SWAP(3)),
        (BLOCK_SWAP(20), 1, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), 0, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), -5, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), 8, BLOCK_SWAP(28)),
        (BLOCK_SWAP(20, 4), 20, LAYERWISE(4)),
        (BLOCK_SWAP(20, 4), 22, LAYERWISE(2)),
        (BLOCK_SWAP(20), 1000, LAYERWISE(1)),
        (LAYERWISE(4), 1, LAYERWISE(3)),
        (LAYERWISE(4), 2, LAYERWISE(2)),
        (LAYERWISE(4), 9, LAYERWISE(1)),
        (LAYERWISE(1), 1, replace(LAYERWISE(1), chunk_tokens=32768)),
        (LAYERWISE(0), 1, replace(LAYERWISE(0), chunk_tokens=32768)),
        (replace(LAYERWISE(1), chunk_tokens=32768), 1, replace(LAYERWISE(1), chunk_tokens=16384)),
        (replace(LAYERWISE(1), chunk_tokens=3000), 1, replace(LAYERWISE(1), chunk_tokens=2048)),
        (replace(LAYERWISE(1), chunk_tokens=2048), 1, None),
        (replace(LAYERWISE(2), chunk_tokens=2048), 1, replace(LAYERWISE(1), chunk_tokens=2048)),
        (BLOCK_SWAP(20, source="pinned"), 3, BLOCK_SWAP(23, source="pinned")),
    ],
)
def test_the_next_smaller_policy(
    policy: OffloadPolicy, missing: float, expected: OffloadPolicy | None
) -> None:
    assert _smaller(policy, missing) == expected


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [(75_600, 32768), (32_768, 16384), (20_280, 16384), (2049, 2048), (2048, None), (12, None)],
)
def test_a_chunk_is_smaller_than_the_sequence(tokens: int, chunk: int | None) -> None:
    """A chunk with all tokens, or more, would change nothing."""
    for policy in (LAYERWISE(1), replace(LAYERWISE(1), chunk_tokens=100_000)):
        found = _smaller(policy, tokens=tokens)
        assert (found and found.chunk_tokens) == chunk


POLICIES = st.one_of(
    st.just(RESIDENT()),
    st.builds(BLOCK_SWAP, st.integers(0, 40), st.integers(0, 6)),
    st.builds(LAYERWISE, st.integers(0, 6)),
)


@given(POLICIES, st.integers(0, 100))
def test_every_policy_comes_to_an_end_and_never_below_two_buffers_unless_requested(
    policy: OffloadPolicy, missing: int
) -> None:
    fewest = 1 if policy.prefetch_blocks == 0 and policy.kind != "resident" else 2
    present: OffloadPolicy | None = policy
    sizes = list[tuple[int, int]]()
    while present is not None:
        sizes.append((_bytes(present), -(present.chunk_tokens or 10**9)))
        assert _bytes(present) >= 10 + fewest or present == policy
        last, present = present, _smaller(present, missing)
    assert _bytes(last) == 10 + fewest
    assert last.chunk_tokens == 2048
    assert len(set(sizes)) == len(sizes), "no policy is tried twice"


@pytest.mark.parametrize(
    ("attempt", "free", "expected"),
    [
        (0, None, 7),
        (1, None, 14),
        (3, None, 56),
        (0, 100, 7),  # the estimate was too small
        (2, 100, 28),
        (0, 60, 40),
        (2, 60, 40),
        (3, 60, 56),
    ],
)
def test_a_retry_frees_the_known_shortage_and_at_least_twice_as_much_each_time(
    attempt: int, free: int | None, expected: int
) -> None:
    assert bytes_to_free(attempt, block=7, working_bytes=100, free_bytes=free) == expected
