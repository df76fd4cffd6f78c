"""Prediction of forward passes whose number and order of blocks are learnt while a model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .visits import Visit

REMEMBERED = 4
"""Orders that are remembered: a cache that skips blocks makes passes of two or three kinds."""


@dataclass(frozen=True, kw_only=True)
class PassOrders:
    """Orders in which forward passes have visited the blocks of one stack, the latest first."""

    blocks: int
    """Number of blocks of the stack."""
    seen: tuple[tuple[int, ...], ...] = ()

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

    def rest_of(self, visited: Sequence[int]) -> tuple[int, ...]:
        """Return the predicted rest of a pass: that of the latest order with the same start, else all blocks left."""
        start = tuple(visited)
        for order in self.seen:
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
    expected = orders.expected
    rest = tuple(Visit(number, stack, block) for block in orders.rest_of(visited))
    later = (Visit(number + 1 + each, stack, block) for each in range(passes_after) for block in expected)
    return (*rest, *later)
