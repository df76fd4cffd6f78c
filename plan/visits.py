"""Visits of a run: the expert of each step, the blocks of each visit, skipped steps, and passes that are learnt."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple


class BlockKey(NamedTuple):
    """Key of one block: its expert ("high" and "low" for Wan) and its index in the expert, from 0."""

    expert: str
    block: int
    patch: int = 0
    """Number of the patch (LoRAs with their strengths) that is added to it, of those of its expert in a run."""

    @property
    def stored(self) -> BlockKey:
        """Key of the block as it is stored, which is the same for all of its patches."""
        return self._replace(patch=0) if self.patch else self


class Visit(NamedTuple):
    """One use of one block in one step. All lanes of the step pass through the block during this visit."""

    step: int
    expert: str
    block: int
    patch: int = 0
    """See `BlockKey.patch`."""

    @property
    def key(self) -> BlockKey:
        """Key of the visited block."""
        return BlockKey(self.expert, self.block, self.patch)


def step_visits(
    experts_of_steps: Sequence[str],
    block_counts: Mapping[str, int],
    *,
    first_step: int = 0,
    skipped: Collection[int] = (),
    patches_of_steps: Sequence[int] = (),
) -> tuple[Visit, ...]:
    """Return the visits of steps that each pass once through all blocks of their expert.

    Args:
        experts_of_steps: `experts_of_steps[i]` runs in step `first_step + i`.
        block_counts: number of blocks of each expert.
        first_step: index of the first step.
        skipped: steps without visits.
        patches_of_steps: `BlockKey.patch` in each step; empty: 0 in all of them.

    Raises:
        ValueError: for an expert without a block count.
    """
    if unknown := sorted(set(experts_of_steps) - set(block_counts)):
        raise ValueError(f"no block count for {unknown[0]!r}: block_counts names {sorted(block_counts)}")
    patches = patches_of_steps or (0,) * len(experts_of_steps)
    return tuple(
        Visit(step, expert, block, patch)
        for step, (expert, patch) in enumerate(zip(experts_of_steps, patches, strict=True), start=first_step)
        if step not in skipped
        for block in range(block_counts[expert])
    )


TRAIN_TIMESTEPS = 1000


def expert_at(timestep: float, boundary_ratio: float) -> str:
    """Return the expert of a step that starts at `timestep`: "high" from boundary_ratio * 1000 on, else "low"."""
    return "high" if timestep >= boundary_ratio * TRAIN_TIMESTEPS else "low"


def split_at_boundary(timesteps: Sequence[float], boundary_ratio: float) -> int:
    """Return the index of the first low-noise step; `len(timesteps)` if every step is high-noise.

    `timesteps` are those at the *start* of each step, from 1000 down to 0. A step is high-noise while
    `t >= boundary_ratio * 1000`. Raises ValueError for a ratio outside 0..1 and for increasing timesteps.
    """
    if not 0.0 <= boundary_ratio <= 1.0:
        raise ValueError(f"boundary_ratio is {boundary_ratio}, it must lie in 0..1 (Wan2.2: T2V 0.875, I2V 0.9)")
    for step, (before, start) in enumerate(pairwise(timesteps), start=1):
        if not before >= start:  # `not >=` also refuses NaN
            raise ValueError(f"timesteps must not rise: step {step - 1} starts at {before}, step {step} at {start}")
    return sum(expert_at(timestep, boundary_ratio) == "high" for timestep in timesteps)


@dataclass(frozen=True, kw_only=True)
class SkipRule:
    """Limits for skipping steps. Raises ValueError for values out of range."""

    threshold: float
    """Accumulated error below which a step is skipped; 0: never skip."""
    max_consecutive_skips: int = 2
    retention: float = 0.2
    """Share of an expert's steps, from its first one on, that are never skipped."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold is {self.threshold}: give 0 (skip nothing) or more")
        if self.max_consecutive_skips < 0:
            raise ValueError(f"max_consecutive_skips is {self.max_consecutive_skips}, it must be 0 or more")
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention is {self.retention}: give a share, 0 to 1")


def skipped_steps(
    stage: Sequence[int], taken: Sequence[int], ratios: Sequence[Sequence[float]], rule: SkipRule
) -> frozenset[int]:
    """Return the steps of one expert that can be skipped.

    Args:
        stage: all steps of the expert in the schedule, in order.
        taken: the steps of the stage that this run takes, in order. The first one cannot be skipped.
        ratios: for each kind of lane, by step of the schedule: magnitude of the residual of the blocks relative to the
            step before. A step is skipped only if the rule allows it for every kind.
    """
    retained = set(stage[: int(rule.retention * len(stage) + 0.5)])
    skipped: set[int] = set()
    sizes, errors, in_a_row = [1.0] * len(ratios), [0.0] * len(ratios), 0
    for place, step in enumerate(taken):
        if step in retained:
            continue
        in_a_row += 1
        sizes = [size * each[step] for size, each in zip(sizes, ratios, strict=True)]
        errors = [error + abs(1 - size) for error, size in zip(errors, sizes, strict=True)]
        if place > 0 and in_a_row <= rule.max_consecutive_skips and all(error < rule.threshold for error in errors):
            skipped.add(step)
        else:
            sizes, errors, in_a_row = [1.0] * len(ratios), [0.0] * len(ratios), 0
    return frozenset(skipped)


REMEMBERED = 4
"""Orders that are remembered: a cache that skips blocks makes passes of two or three kinds."""


@dataclass(frozen=True, kw_only=True)
class PassOrders:
    """Orders in which forward passes have visited the blocks of one stack, the latest first."""

    blocks: int
    """Number of blocks of the stack."""
    seen: tuple[tuple[int, ...], ...] = ()
    course: tuple[tuple[int, ...], ...] = ()
    """Orders of all passes of an earlier run like this one, from its first on; empty for a first run."""

    @property
    def expected(self) -> tuple[int, ...]:
        """Predicted order of a pass that has not started: the longest one, or all blocks in the order of the stack."""
        return max(self.seen, key=len, default=tuple(range(self.blocks)))

    def learn(self, order: Sequence[int]) -> PassOrders:
        """Return the orders after a pass; a pass without blocks, as of a cache that skips it, teaches nothing."""
        if not order:
            return self
        latest = tuple(order)
        return replace(self, seen=(latest, *(each for each in self.seen if each != latest))[:REMEMBERED])

    def order_of(self, number: int) -> tuple[int, ...]:
        """Return the predicted order of pass `number` of a run, which has not started."""
        return self.course[number] if number < len(self.course) else self.expected

    def rest_of(self, visited: Sequence[int], number: int = 0) -> tuple[int, ...]:
        """Return the predicted rest of pass `number` of a run.

        It is that of the same pass of the run before, else of the latest pass, with the same start; else all blocks
        that are left.
        """
        start = tuple(visited)
        for order in (*self.course[number : number + 1], *self.seen):
            if order[: len(start)] == start:
                return order[len(start) :]
        if not start:
            return self.expected
        passed = set(start)
        return tuple(block for block in range(self.blocks) if block not in passed)


def predict_visits(
    orders: PassOrders, stack: str, visited: Sequence[int], *, passes_after: int, number: int
) -> tuple[Visit, ...]:
    """Return the predicted visits of pass `number` after its blocks `visited`, and of `passes_after` more passes."""
    rest = tuple(Visit(number, stack, block) for block in orders.rest_of(visited, number))
    passes = range(number + 1, number + 1 + passes_after)
    return (*rest, *(Visit(each, stack, block) for each in passes for block in orders.order_of(each)))
