"""Smaller policies: before a run to fit a budget, and after an out-of-memory error; and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ..schema import OffloadPolicy, PolicyKind, Residency
from .candidates import CHUNKS
from .visits import BlockKey

MIN_PREFETCH = 1
"""Smallest prefetch depth of a shrunk policy, unless the user chose 0: without it nothing overlaps."""


def shrink_to_budget(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    budget: float,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy:
    """Return `policy` if its `device_bytes` are within `budget` bytes, else the nearest smaller policy.

    The number of residents is reduced first, then the prefetch depth, down to two buffers (one if the policy has no
    prefetch). The smallest policy is returned even if it does not fit: the experts cannot run with less. The settings
    for RAM and `chunk_tokens` do not change.
    """
    smallest = policy
    for smallest in (policy, *_smaller(policy, min(block_counts.values()))):
        if device_bytes(smallest) <= budget:
            break
    return smallest


def keep_near_policy(
    present: OffloadPolicy, fitted: OffloadPolicy, *, budget: float, device_bytes: Callable[[OffloadPolicy], int]
) -> OffloadPolicy:
    """Return `present` if it is within `budget` bytes and `fitted` has at most one resident block more, else `fitted`.

    A new policy means a new pool of buffers, which is not worth it each time the free memory changes by one block.
    Policies that differ in RAM settings or `chunk_tokens` are never near.
    """
    as_present = _with(fitted, present.kind, ahead=present.prefetch_blocks, swapped=present.blocks_to_swap)
    if as_present != present:
        return fitted
    block = device_bytes(_with(fitted, "layerwise", ahead=1)) - device_bytes(_with(fitted, "layerwise", ahead=0))
    taken = device_bytes(present)
    return present if taken <= budget and 0 <= device_bytes(fitted) - taken <= block else fitted


def _smaller(policy: OffloadPolicy, blocks: int) -> Iterator[OffloadPolicy]:
    """Yield policies for stacks of `blocks` blocks, from many residents to none; the first may exceed `policy`."""
    ahead = MIN_PREFETCH if policy.kind == "resident" else policy.prefetch_blocks
    if policy.kind != "layerwise":
        for swapped in range(blocks):
            yield _with(policy, "block_swap", ahead=ahead, swapped=swapped)
    for fewer in range(ahead, min(ahead, MIN_PREFETCH) - 1, -1):
        yield _with(policy, "layerwise", ahead=fewer)


def _with(policy: OffloadPolicy, kind: PolicyKind, *, ahead: int, swapped: int = 0) -> OffloadPolicy:
    return replace(policy, kind=kind, prefetch_blocks=ahead, blocks_to_swap=swapped)


def next_smaller_policy(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    missing: float,
    tokens: int,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy | None:
    """Return the nearest policy that takes `missing` bytes less of the device, or None if no policy is smaller.

    The number of residents is reduced first, then the prefetch depth, as in `shrink_to_budget`. The result is used
    even if it
    saves less than `missing`, because more memory may be free than was reported. Last, fewer of the `tokens` of a lane
    go through feed-forward and norms at once, which costs time in every block.
    """
    present = device_bytes(policy)
    fitted = shrink_to_budget(policy, block_counts, budget=present - max(1, missing), device_bytes=device_bytes)
    if device_bytes(fitted) < present:
        return fitted
    at_once = tokens if policy.chunk_tokens is None else min(tokens, policy.chunk_tokens)
    fewer = [chunk for chunk in CHUNKS if chunk is not None and chunk < at_once]
    return replace(policy, chunk_tokens=max(fewer)) if fewer else None


def bytes_to_free(attempt: int, *, block: int, working_bytes: int, free_bytes: int | None) -> int:
    """Return the bytes to free before retry number `attempt` (from 0) of a step that ran out of memory.

    It is the known shortage, and at least twice as many blocks as before the last retry: the needs of a step are an
    estimate, and 40 residents must not take 40 retries. `free_bytes` None: unknown.
    """
    shortage = 0 if free_bytes is None else working_bytes - free_bytes
    return max(shortage, block << attempt)


def eviction_order(buffers: Iterable[int], contents: Mapping[int, BlockKey], residency: Residency) -> tuple[int, ...]:
    """Return `buffers` in order of eviction, the least useful first.

    Empty buffers come first, then those with streamed blocks, then those with residents. Within each kind the block
    that the next run visits last comes first, because there is the most time to fetch it again.
    """
    experts = {expert: number for number, expert in enumerate(residency.residents)}

    def usefulness(buffer: int) -> tuple[int, int, int]:
        block = contents.get(buffer)
        if block is None:
            return (0, 0, -buffer)
        resident = residency.keeps(block.expert, block.block)
        return (2 if resident else 1, -experts.get(block.expert, len(experts)), -block.block)

    return tuple(sorted(buffers, key=usefulness))
