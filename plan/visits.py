"""The run as the program sees it: visits, one for every use of a block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class BlockKey(NamedTuple):
    """Names one block: the stack it belongs to ("high" and "low" for Wan) and its place in it, counted from 0."""

    expert: str
    block: int


class Visit(NamedTuple):
    """One use of one block in one step. All lanes of the step pass through the block during this visit."""

    step: int
    expert: str
    block: int

    @property
    def key(self) -> BlockKey:
        return BlockKey(self.expert, self.block)


def step_visits(
    experts_of_steps: Sequence[str],
    block_counts: Mapping[str, int],
    *,
    first_step: int = 0,
    skipped: Collection[int] = (),
) -> tuple[Visit, ...]:
    """Visits of steps that each pass once through all blocks of their expert.

    `experts_of_steps[i]` runs in step `first_step + i`; the steps that `skipped` names need no block. Raises ValueError
    for an expert without a block count.
    """
    if unknown := sorted(set(experts_of_steps) - set(block_counts)):
        raise ValueError(f"no block count for {unknown[0]!r}: block_counts names {sorted(block_counts)}")
    return tuple(
        Visit(step, expert, block)
        for step, expert in enumerate(experts_of_steps, start=first_step)
        if step not in skipped
        for block in range(block_counts[expert])
    )
