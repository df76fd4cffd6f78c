"""An offload policy for less device memory than the asked one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .residency import OffloadPolicy

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
    with less.
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

    Another policy is another engine, which fetches all anew that was kept: not worth it each time the room for a block
    comes or goes.
    """
    block = device_bytes(OffloadPolicy.layerwise(1)) - device_bytes(OffloadPolicy.layerwise(0))
    taken = device_bytes(present)
    return present if taken <= budget and 0 <= device_bytes(fitted) - taken <= block else fitted


def _smaller(policy: OffloadPolicy, blocks: int) -> Iterator[OffloadPolicy]:
    """Policies for stacks of `blocks` blocks, from many residents to none; some may take more than `policy`."""
    source = policy.source
    ahead = FEWEST_AHEAD if policy.kind == "resident" else policy.prefetch_blocks
    if policy.kind != "layerwise":
        for swapped in range(blocks):
            yield OffloadPolicy.block_swap(swapped, ahead, source=source)
    for fewer in range(ahead, min(ahead, FEWEST_AHEAD) - 1, -1):
        yield OffloadPolicy.layerwise(fewer, source=source)
