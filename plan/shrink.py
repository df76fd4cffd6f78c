"""Smaller policies: to fit a budget before a run, after an out-of-memory error, and between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ..schema import OffloadPolicy, PolicyKind, Residency
from .candidates import CHUNKS
from .visits import BlockKey

FEWEST_AHEAD = 1
"""Blocks that lie ahead however little memory there is, unless a user asks for none: without it nothing overlaps."""


def fit_policy(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    budget: float,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy:
    """`policy` where its `device_bytes` are within `budget` bytes, else what is nearest to it.

    First fewer blocks stay resident, as few less as possible; then fewer lie ahead, down to two buffers (one, where
    the policy asks for no prefetch). Where not even those fit they are returned all the same: the experts cannot run
    with less. What the policy says about RAM and about the tokens that are computed at once stays as it is.
    """
    smallest = policy
    for smallest in (policy, *_smaller(policy, min(block_counts.values()))):
        if device_bytes(smallest) <= budget:
            break
    return smallest


def stay_near(
    present: OffloadPolicy, fitted: OffloadPolicy, *, budget: float, device_bytes: Callable[[OffloadPolicy], int]
) -> OffloadPolicy:
    """`present` where it is within `budget` bytes and `fitted` keeps at most one block more, else `fitted`.

    Another policy is another pool of buffers: not worth it each time the room for a block comes or goes. Policies that
    say different things about RAM, or about the tokens that are computed at once, are never near.
    """
    as_present = _with(fitted, present.kind, ahead=present.prefetch_blocks, swapped=present.blocks_to_swap)
    if as_present != present:
        return fitted
    block = device_bytes(_with(fitted, "layerwise", ahead=1)) - device_bytes(_with(fitted, "layerwise", ahead=0))
    taken = device_bytes(present)
    return present if taken <= budget and 0 <= device_bytes(fitted) - taken <= block else fitted


def _smaller(policy: OffloadPolicy, blocks: int) -> Iterator[OffloadPolicy]:
    """Policies for stacks of `blocks` blocks, from many residents to none; some may take more than `policy`."""
    ahead = FEWEST_AHEAD if policy.kind == "resident" else policy.prefetch_blocks
    if policy.kind != "layerwise":
        for swapped in range(blocks):
            yield _with(policy, "block_swap", ahead=ahead, swapped=swapped)
    for fewer in range(ahead, min(ahead, FEWEST_AHEAD) - 1, -1):
        yield _with(policy, "layerwise", ahead=fewer)


def _with(policy: OffloadPolicy, kind: PolicyKind, *, ahead: int, swapped: int = 0) -> OffloadPolicy:
    return replace(policy, kind=kind, prefetch_blocks=ahead, blocks_to_swap=swapped)


def smaller_policy(
    policy: OffloadPolicy,
    block_counts: Mapping[str, int],
    *,
    missing: float,
    tokens: int,
    device_bytes: Callable[[OffloadPolicy], int],
) -> OffloadPolicy | None:
    """What is nearest to `policy` and leaves `missing` bytes more of the device free; None where nothing is smaller.

    First fewer blocks stay resident, then fewer lie ahead, down to two buffers (one, where the policy asks for no
    prefetch); where that is less than `missing`, it is taken all the same, because more may be free than is known. Then
    fewer of the `tokens` of a lane go through feed-forward and norms at once, which costs time in every block.
    """
    present = device_bytes(policy)
    fitted = fit_policy(policy, block_counts, budget=present - max(1, missing), device_bytes=device_bytes)
    if device_bytes(fitted) < present:
        return fitted
    at_once = tokens if policy.chunk_tokens is None else min(tokens, policy.chunk_tokens)
    fewer = [chunk for chunk in CHUNKS if chunk is not None and chunk < at_once]
    return replace(policy, chunk_tokens=max(fewer)) if fewer else None


def bytes_to_free(attempt: int, *, block: int, working_bytes: int, free_bytes: int | None) -> int:
    """How many bytes to free before a step is tried for the `attempt`-th time again, from 0.

    What the step is known to lack, and at least twice as many blocks as the time before: what a step really takes is
    not known to the byte, and 40 residents must not become 40 attempts. `free_bytes` None: not known.
    """
    lacking = 0 if free_bytes is None else working_bytes - free_bytes
    return max(lacking, block << attempt)


def eviction_order(buffers: Iterable[int], contents: Mapping[int, BlockKey], residency: Residency) -> tuple[int, ...]:
    """Return `buffers`, the least useful first.

    Buffers that hold nothing go before those with streamed blocks, and these before those with residents. Of each kind
    the block goes first that the next run reaches last, because its fetch has most time to bring it back.
    """
    experts = {expert: number for number, expert in enumerate(residency.residents)}

    def usefulness(buffer: int) -> tuple[int, int, int]:
        block = contents.get(buffer)
        if block is None:
            return (0, 0, -buffer)
        resident = residency.keeps(block.expert, block.block)
        return (2 if resident else 1, -experts.get(block.expert, len(experts)), -block.block)

    return tuple(sorted(buffers, key=usefulness))
