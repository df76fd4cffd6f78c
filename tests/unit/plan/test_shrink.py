"""Policies shrunk to fit, and the next smaller policy after an out-of-memory error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan import bytes_to_free, keep_near_policy, next_smaller_policy, shrink_to_budget
from wanstream.schema import OffloadPolicy, plan_residency
from wanstream.shapes import chunks_below

COUNTS = {"high": 40, "low": 40}
OUTSIDE = 10
"""Bytes outside streaming. A buffer takes 1."""

RESIDENT = OffloadPolicy.resident
BLOCK_SWAP = OffloadPolicy.block_swap
LAYERWISE = OffloadPolicy.layerwise
STREAMED = st.builds(LAYERWISE, st.integers(0, 6))
SWAPPED = st.builds(BLOCK_SWAP, st.integers(0, 40), st.integers(0, 6))
POLICIES = st.just(RESIDENT()) | SWAPPED | STREAMED


def _bytes(policy: OffloadPolicy) -> int:
    return OUTSIDE + plan_residency(policy, COUNTS)[1]


def _fit(policy: OffloadPolicy, buffers: float) -> OffloadPolicy:
    return shrink_to_budget(policy, COUNTS, budget=OUTSIDE + buffers, device_bytes=_bytes)


def _smaller(policy, missing=1, tokens=75_600) -> OffloadPolicy | None:
    chunks = chunks_below(tokens)
    return next_smaller_policy(policy, COUNTS, missing=missing, chunks=chunks, device_bytes=_bytes)


def _chunked(chunk_tokens: int, ahead: int = 1) -> OffloadPolicy:
    return replace(LAYERWISE(ahead), chunk_tokens=chunk_tokens)


def _fewest_buffers(policy: OffloadPolicy) -> int:
    return 1 if policy.prefetch_blocks == 0 and policy.kind != "resident" else 2


@pytest.mark.parametrize(
    ("requested", "buffers", "fitted"),
    [
        (BLOCK_SWAP(20), 22, BLOCK_SWAP(20)),
        (BLOCK_SWAP(20), 21.9, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), 3, BLOCK_SWAP(39)),
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
        (LAYERWISE(3), 3, LAYERWISE(2)),
        (LAYERWISE(0), 0, LAYERWISE(0)),
    ],
)
def test_fitted_policies(requested, buffers, fitted):
    assert _fit(requested, buffers) == fitted


@settings(max_examples=30)
@given(POLICIES, st.integers(0, 90))
def test_a_policy_fits_unless_none_can_and_fits_again(requested, buffers):
    """More residents than requested are possible: forty residents need no streaming buffer."""
    fitted = _fit(requested, buffers)
    more = _fit(requested, buffers + 1)
    fewest = _fewest_buffers(requested)
    assert _bytes(fitted) <= OUTSIDE + max(buffers, fewest)
    assert _bytes(fitted) >= OUTSIDE + min(fewest, _bytes(requested) - OUTSIDE)
    assert _fit(fitted, buffers) == fitted
    planned = (plan_residency(policy, COUNTS)[0] for policy in (fitted, more, requested))
    kept, kept_with_more, asked = (len(residency.residents["high"]) for residency in planned)
    assert min(kept, asked) <= kept_with_more
    in_ram = {"source": "pinned", "ram_blocks": 7, "chunk_tokens": 4096}
    assert _fit(replace(requested, **in_ram), buffers) == replace(fitted, **in_ram)


@pytest.mark.parametrize(
    ("present", "buffers", "kept"),
    [
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
def test_the_present_policy_is_kept_until_two_more_blocks_fit(present, buffers, kept):
    fitted = _fit(BLOCK_SWAP(20), buffers)
    assert keep_near_policy(present, fitted, budget=OUTSIDE + buffers, device_bytes=_bytes) == kept


def test_policies_with_other_ram_or_token_settings_are_not_near():
    present = replace(BLOCK_SWAP(30), source="pinned", ram_blocks=7)
    cases = [({"blocks_to_swap": 29}, True), ({"ram_blocks": 8}, False)]
    cases += [({"ram_blocks": None}, False), ({"chunk_tokens": 512}, False)]
    for change, kept in cases:
        fitted = replace(present, **change)  # type: ignore[arg-type]
        found = keep_near_policy(present, fitted, budget=1e32, device_bytes=_bytes)
        assert found == (present if kept else fitted), change


@pytest.mark.parametrize(
    ("policy", "missing", "expected"),
    [
        (RESIDENT(), 1, BLOCK_SWAP(0)),
        (RESIDENT(), 50, BLOCK_SWAP(12)),
        (BLOCK_SWAP(0), 1, BLOCK_SWAP(3)),
        (BLOCK_SWAP(20), -5, BLOCK_SWAP(21)),
        (BLOCK_SWAP(20), 8, BLOCK_SWAP(28)),
        (BLOCK_SWAP(20, 4), 22, LAYERWISE(2)),
        (BLOCK_SWAP(20), 1000, LAYERWISE(1)),
        (LAYERWISE(4), 2, LAYERWISE(2)),
        (LAYERWISE(4), 9, LAYERWISE(1)),
        (LAYERWISE(1), 1, _chunked(32768)),
        (LAYERWISE(0), 1, _chunked(32768, ahead=0)),
        (_chunked(3000), 1, _chunked(2048)),
        (_chunked(2048), 1, None),
        (_chunked(2048, ahead=2), 1, _chunked(2048)),
        (BLOCK_SWAP(20, source="pinned"), 3, BLOCK_SWAP(23, source="pinned")),
    ],
)
def test_the_next_smaller_policy(policy, missing, expected):
    assert _smaller(policy, missing) == expected


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(75_600, 32768), (32_768, 16384), (2049, 2048), (2048, None), (12, None)]
)
def test_a_chunk_is_smaller_than_the_sequence(tokens, chunk):
    """A chunk with all tokens, or more, would change nothing."""
    for policy in (LAYERWISE(1), _chunked(100_000)):
        found = _smaller(policy, tokens=tokens)
        assert (found and found.chunk_tokens) == chunk


@settings(max_examples=30)
@given(POLICIES, st.integers(0, 100))
def test_smaller_policies_end_at_two_buffers(policy, missing):
    fewest = _fewest_buffers(policy)
    present: OffloadPolicy | None = policy
    sizes = list[tuple[int, int]]()
    while present is not None:
        sizes.append((_bytes(present), -(present.chunk_tokens or 10**9)))
        assert _bytes(present) >= OUTSIDE + fewest or present == policy
        last = present
        present = _smaller(present, missing)
    assert _bytes(last) == OUTSIDE + fewest
    assert last.chunk_tokens == 2048
    assert len(set(sizes)) == len(sizes), "no policy is tried twice"


@pytest.mark.parametrize(
    ("attempt", "free", "expected"),
    [
        (0, None, 7),
        (3, None, 56),
        (0, 100, 7),  # the estimate was too small
        (2, 60, 40),
        (3, 60, 56),
    ],
)
def test_oom_retry_frees_twice_as_much_each_time(attempt, free, expected):
    assert bytes_to_free(attempt, block=7, working_bytes=100, free_bytes=free) == expected
