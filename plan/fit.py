"""An offload policy for less device memory than the asked one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from .residency import OffloadPolicy, PolicyKind

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
