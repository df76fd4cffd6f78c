"""Visits in a run: experts per step, blocks per visit, skipped steps, and learnt passes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple


class BlockKey(NamedTuple):
    """Block key: expert ("high" and "low" for Wan) and index within the expert, from 0."""

    expert: str
    block: int
    patch: int = 0
    """Number of the patch (LoRAs with strengths) added to it, among the expert's patches in a
    run."""

    @property
    def stored(self) -> BlockKey:
        """Key without the patch: every patch uses the same stored block."""
        return self._replace(patch=0) if self.patch else self


class Visit(NamedTuple):
    """One use of one block in one step.

    All lanes in the step pass through the block during this visit.
    """

    step: int
    expert: str
    block: int
    patch: int = 0
    """See `BlockKey.patch`."""

    @property
    def key(self) -> BlockKey:
        """Key for the visited block."""
        return BlockKey(self.expert, self.block, self.patch)


def step_visits(
    experts_of_steps: Sequence[str],
    block_counts: Mapping[str, int],
    *,
    first_step: int = 0,
    skipped: Collection[int] = (),
    patches_of_steps: Sequence[int] = (),
) -> tuple[Visit, ...]:
    """Return visits for steps with one pass each through all blocks in their expert.

    Args:
        experts_of_steps: `experts_of_steps[i]` runs in step `first_step + i`.
        block_counts: block count per expert.
        first_step: index of the first step.
        skipped: steps without visits.
        patches_of_steps: `BlockKey.patch` in each step. Empty: 0 in all steps.

    Raises:
        ValueError: for an expert without a block count.
    """
    if unknown := sorted(set(experts_of_steps) - set(block_counts)):
        raise ValueError(
            f"no block count for {unknown[0]!r}: block_counts names {sorted(block_counts)}"
        )
    patches = patches_of_steps or (0,) * len(experts_of_steps)
    return tuple(
        Visit(step, expert, block, patch)
        for step, (expert, patch) in enumerate(
            zip(experts_of_steps, patches, strict=True), start=first_step
        )
        if step not in skipped
        for block in range(block_counts[expert])
    )


TRAIN_TIMESTEPS = 1000


def expert_at(timestep: float, boundary_ratio: float) -> str:
    """Return the expert for a step with `timestep` at the start.

    It is "high" from boundary_ratio * 1000 on, else "low".
    """
    return "high" if timestep >= boundary_ratio * TRAIN_TIMESTEPS else "low"


def split_at_boundary(timesteps: Sequence[float], boundary_ratio: float) -> int:
    """Return the index of the first low-noise step, or `len(timesteps)` if all are high-noise.

    `timesteps` has the value at the *start* of each step, from 1000 down to 0. A step is high-noise
    while `t >= boundary_ratio * 1000`. Raises ValueError for a ratio outside 0..1 and for
    increasing timesteps.
    """
    if not 0.0 <= boundary_ratio <= 1.0:
        raise ValueError(
            f"boundary_ratio is {boundary_ratio}, it must lie in 0..1 (Wan2.2: T2V 0.875, I2V 0.9)"
        )
    for step, (before, start) in enumerate(pairwise(timesteps), start=1):
        if not before >= start:  # `not >=` also refuses NaN
            raise ValueError(
                f"timesteps must not rise: step {step - 1} starts at {before}, step {step} at "
                f"{start}"
            )
    return sum(expert_at(timestep, boundary_ratio) == "high" for timestep in timesteps)


@dataclass(frozen=True, kw_only=True)
class SkipRule:
    """Limits for skipping steps. Raises ValueError for values out of range."""

    threshold: float
    """Limit for the accumulated error in a skipped step. 0: never skip."""
    max_consecutive_skips: int = 2
    retention: float = 0.2
    """Share of an expert's steps, from the first one on, that are never skipped."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold is {self.threshold}: give 0 (skip nothing) or more")
        if self.max_consecutive_skips < 0:
            raise ValueError(
                f"max_consecutive_skips is {self.max_consecutive_skips}, it must be 0 or more"
            )
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention is {self.retention}: give a share, 0 to 1")


def skipped_steps(
    stage: Sequence[int], taken: Sequence[int], ratios: Sequence[Sequence[float]], rule: SkipRule
) -> frozenset[int]:
    """Return the steps of one expert that can be skipped.

    Args:
        stage: all steps in the schedule for the expert, in order.
        taken: steps in the stage taken by this run, in order. The first one cannot be skipped.
        ratios: for each kind of lane, by step in the schedule: magnitude of the blocks' residual
            relative to the step before. A step is skipped only if the rule allows it for every
            kind.
    """
    # Half up. `round` would round half to even.
    retained = set(stage[: int(rule.retention * len(stage) + 0.5)])
    skipped: set[int] = set()
    sizes = [1.0] * len(ratios)
    errors = [0.0] * len(ratios)
    in_a_row = 0
    for place, step in enumerate(taken):
        # These are the first steps in the stage, so the sums have not begun.
        if step in retained:
            continue
        in_a_row += 1
        # Ratios are from step to step. The product is relative to the last computed step.
        sizes = [size * each[step] for size, each in zip(sizes, ratios, strict=True)]
        errors = [error + abs(1 - size) for error, size in zip(errors, sizes, strict=True)]
        is_small = all(error < rule.threshold for error in errors)
        if place > 0 and in_a_row <= rule.max_consecutive_skips and is_small:
            skipped.add(step)
        else:
            sizes = [1.0] * len(ratios)
            errors = [0.0] * len(ratios)
            in_a_row = 0
    return frozenset(skipped)


REMEMBERED = 4
"""Orders to remember. A cache with block skipping makes passes of two or three kinds."""


@dataclass(frozen=True, kw_only=True)
class PassOrders:
    """Block orders of past forward passes through one stack, the latest first."""

    blocks: int
    """Block count in the stack."""
    lists: tuple[int, ...] = ()
    """First block in each list of the stack. Empty: it is one list."""
    seen: tuple[tuple[int, ...], ...] = ()
    course: tuple[tuple[int, ...], ...] = ()
    """Orders for all passes in an earlier run like this one, from the first on. Empty for a first
    run."""

    @property
    def expected(self) -> tuple[int, ...]:
        """Predicted order for a future pass: the longest seen, or all blocks in stack order."""
        return max(self.seen, key=len, default=tuple(range(self.blocks)))

    def learn(self, order: Sequence[int]) -> PassOrders:
        """Return the orders after a pass.

        A pass without blocks teaches nothing, such as one skipped by a cache.
        """
        if not order:
            return self
        latest = tuple(order)
        return replace(
            self, seen=(latest, *(each for each in self.seen if each != latest))[:REMEMBERED]
        )

    def order_of(self, number: int) -> tuple[int, ...]:
        """Return the predicted order of a run's pass `number`, before it starts."""
        return self.course[number] if number < len(self.course) else self.expected

    def rest_of(self, visited: Sequence[int], number: int = 0) -> tuple[int, ...]:
        """Return the predicted rest of a run's pass `number`.

        It comes from the same pass in the run before, else from the latest pass with the same
        start, else it is the blocks left over. A pass that does not begin with block 0 begins with
        a list the model was built with later, whose blocks follow each other. Lists it has passed
        over come last. A list that others have interrupted twice is interrupted at such distances.
        """
        start = tuple(visited)
        # A slice may be empty: a run may make more passes than the one before.
        for order in (*self.course[number : number + 1], *self.seen):
            if order[: len(start)] == start:
                return order[len(start) :]
        if not start:
            return self.expected
        in_turns = self._in_turns(start)
        passed = {*start, *in_turns}
        first = start[-1] + 1 if start[0] else 0
        order = (*range(first, self.blocks), *range(first))
        begun = {self._list_of(block) for block in start}
        left = (block for block in order if block not in passed)
        return in_turns + tuple(
            sorted(left, key=lambda block: block < start[-1] and self._list_of(block) not in begun)
        )

    def _in_turns(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rest of the longest list, with blocks of other lists in between.

        Empty unless it was interrupted twice in the same way.
        """
        bounds = (0, *self.lists, self.blocks)
        begun = {self._list_of(block) for block in start}
        longest = max(begun, key=lambda each: bounds[each + 1] - bounds[each])
        turns, at = self._interruptions(longest, start)
        if len(turns) < 2:
            return ()
        (before, usual), (latest, present) = [*turns.items()][-2:]
        distance = latest - before
        shift = present[0] - usual[0]
        usual = tuple(block + shift for block in usual)
        expected = usual
        if at == latest:  # the interruption may go on
            expected = usual[: len(present)]
        if present != expected or not latest <= at <= latest + distance:
            return ()
        rest: list[int] = []
        for block in range(at, bounds[longest + 1]):
            if block > at:
                rest.append(block)
            number, between = divmod(block - latest, distance)
            if not between:
                # Part of the latest interruption may be over.
                skipped = len(present) if block == latest else 0
                for each in usual[skipped:]:
                    moved = each + number * shift
                    # An interruption does not go on into the next list.
                    if moved < self.blocks and self._list_of(moved) == self._list_of(each):
                        rest.append(moved)
        return tuple(rest)

    def _interruptions(
        self, interrupted: int, start: tuple[int, ...]
    ) -> tuple[dict[int, tuple[int, ...]], int]:
        """Return blocks of other lists behind each block of a list, and the latest block of it."""
        turns: dict[int, tuple[int, ...]] = {}
        at = -1
        for block in start:
            if self._list_of(block) == interrupted:
                at = block
            elif at >= 0:
                turns[at] = (*turns.get(at, ()), block)
        return turns, at

    def _list_of(self, block: int) -> int:
        return bisect_right(self.lists, block)


def predict_visits(
    orders: PassOrders, stack: str, visited: Sequence[int], *, passes_after: int, number: int
) -> tuple[Visit, ...]:
    """Return the predicted visits for pass `number` and `passes_after` more passes.

    The blocks `visited` in pass `number` are over. Passes after the very first are like it.
    """
    order = orders.rest_of(visited, number)
    rest = tuple(Visit(number, stack, block) for block in order)
    if not orders.seen:
        orders = orders.learn((*visited, *order))
    passes = range(number + 1, number + 1 + passes_after)
    return (
        *rest,
        *(Visit(each, stack, block) for each in passes for block in orders.order_of(each)),
    )
