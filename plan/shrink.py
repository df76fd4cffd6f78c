"""Smaller policies: before a run to fit a budget, and after an out-of-memory error.

`bytes_to_free` has the amount to free before a retry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..schema import OffloadPolicy, PolicyKind

MIN_PREFETCH = 1
"""Smallest prefetch depth in a shrunk policy, unless the user chose 0. Without prefetch nothing
overlaps."""


def shrink_to_budget(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    budget: float,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy:
    """Return `policy` if its `device_bytes` are within `budget`, else the nearest smaller policy.

    Residents are reduced first, then the prefetch depth, down to two buffers (one if the policy has
    no prefetch). The smallest policy is returned even if it does not fit, because the experts
    cannot run with less. RAM settings and `chunk_tokens` do not change.
    """
    smallest = policy
    for smallest in (policy, *_smaller(policy, min(block_counts.values()))):
        if device_bytes(smallest) <= budget:
            break
    return smallest


def keep_near_policy(
    present: OffloadPolicy,
    fitted: OffloadPolicy,
    *,
    budget: float,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy:
    """Return `present` if it fits `budget` and is near `fitted`, else `fitted`.

    A present policy fits if it takes at most `budget` bytes. It is near if `fitted` has at most one
    more resident block. A new policy means a new buffer pool, too high a price each time free
    memory changes by one block. Policies with different RAM settings or `chunk_tokens` are never
    near.
    """
    as_present = _with(
        fitted, present.kind, ahead=present.prefetch_blocks, swapped=present.blocks_to_swap
    )
    if as_present != present:
        return fitted
    block = device_bytes(_with(fitted, "layerwise", ahead=1)) - device_bytes(
        _with(fitted, "layerwise", ahead=0)
    )
    taken = device_bytes(present)
    if taken <= budget and 0 <= device_bytes(fitted) - taken <= block:
        return present
    return fitted


def _smaller(policy: OffloadPolicy, blocks: int) -> Iterator[OffloadPolicy]:
    """Yield policies for stacks with `blocks` blocks, from many residents to none.

    The first may exceed `policy`.
    """
    # A resident policy has depth 0. The smaller ones stream, and need a prefetch.
    ahead = {"resident": MIN_PREFETCH}.get(policy.kind, policy.prefetch_blocks)
    if policy.kind != "layerwise":
        for swapped in range(blocks):
            yield _with(policy, "block_swap", ahead=ahead, swapped=swapped)
    for fewer in range(ahead, min(ahead, MIN_PREFETCH) - 1, -1):
        yield _with(policy, "layerwise", ahead=fewer)


def _with(
    policy: OffloadPolicy, kind: PolicyKind, *, ahead: int, swapped: int = 0
) -> OffloadPolicy:
    return replace(policy, kind=kind, prefetch_blocks=ahead, blocks_to_swap=swapped)


def next_smaller_policy(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    missing: float,
    chunks: Sequence[int] = (),
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy | None:
    """Return the nearest policy with `missing` fewer device bytes, or None without one.

    Residents are reduced first, then the prefetch depth, as in `shrink_to_budget`. The result is
    used even if it saves less than `missing`, because more memory may be free than was reported.
    Last, `chunk_tokens` is reduced to the next entry in `chunks`. This costs time in every block.
    """
    present = device_bytes(policy)
    # At least one byte less: a reported shortage of 0 must not return the same policy.
    fitted = shrink_to_budget(
        policy, block_counts, budget=present - max(1, missing), device_bytes=device_bytes
    )
    if device_bytes(fitted) < present:
        return fitted
    fewer = [
        chunk for chunk in chunks if policy.chunk_tokens is None or chunk < policy.chunk_tokens
    ]
    if not fewer:
        return None
    return replace(policy, chunk_tokens=max(fewer))


def bytes_to_free(attempt: int, *, block: int, working_bytes: int, free_bytes: int | None) -> int:
    """Return the bytes to free before retry `attempt` (from 0) after a step ran out of memory.

    It is the known shortage, and at least twice as many blocks as at the last retry. Needs are an
    estimate, and 40 residents must not take 40 retries. `free_bytes` None: unknown.
    """
    if free_bytes is None:
        free_bytes = working_bytes
    # The retries free 1, 2, 4, ... blocks.
    return max(working_bytes - free_bytes, block << attempt)
