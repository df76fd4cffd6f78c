"""Sources of calls: a run's predicted visits, corrected by each pass through the blocks.

`StepCalls` are calls to experts, known in advance or predicted from a sampler's sigmas. `PassCalls`
are forward passes through one stack, in a learnt order. `StackCalls` are such passes through one
stack or several, as a sampler's calls need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple, Protocol

from ...plan.programs import PassOrders, Visit, predict_visits, step_visits

CALLS_AHEAD = 8
"""Calls to one expert assumed without a prediction. A wrong guess wastes at most the prefetch
depth."""


class CallSource(Protocol):
    """Predicted passes in one run, from the present place on."""

    @property
    def is_over(self) -> bool:
        """True if no further pass is predicted."""

    def predicted(self, visited: Sequence[int]) -> tuple[Visit, ...]:
        """Return the predicted visits from now on, in this pass after its blocks `visited`."""

    def expect(self, stack: str) -> bool:
        """Correct the prediction: a pass through `stack` comes next.

        Return False if it was not predicted.
        """

    def begin_pass(self, stack: str = "") -> bool:
        """Start a pass, for the first time or after an error.

        Return False if another stack than `stack` was predicted. Empty: the call's stack.
        """

    def visit(self, block: int) -> Visit:
        """Return the visit to a block in this pass."""

    def surprise(self) -> None:
        """Adapt to a block that was not the predicted one."""

    def end_pass(self, visited: Sequence[int], *, is_whole: bool = True) -> None:
        """End a pass. After an error it is not whole, and the order is not learnt."""

    def end_call(self) -> bool:
        """End a model call after all its passes.

        A call that fails after its passes is predicted again. Return False if another stack follows
        sooner or later than predicted.
        """


def predict_again(rest: Sequence[str], expert: str) -> tuple[str, ...]:
    """Predict the calls from an unpredicted call to `expert` on. `rest` was predicted before.

    If `rest` contains a call to `expert`, the prediction continues there. Otherwise `CALLS_AHEAD`
    calls to `expert` are put before it.
    """
    if expert in rest:
        return tuple(rest[rest.index(expert) :])
    return (expert,) * CALLS_AHEAD + tuple(rest)


class StepCalls:
    """Calls that each pass once through all blocks in one expert.

    Args:
        experts: expert for each coming call, in order.
        block_counts: block count per expert.
        first_step: `Visit.step` in the first call.
        patch_at: returns `BlockKey.patch` for an expert in a step.
        skipped: returns the steps without visits.
    """

    def __init__(
        self,
        experts: Sequence[str],
        block_counts: Mapping[str, int],
        *,
        first_step: int = 0,
        patch_at: Callable[[str, int], int] = lambda _expert, _step: 0,
        skipped: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.expected = tuple(experts)
        self.step = first_step
        """Step of the present call, or of the next one."""
        self._block_counts = block_counts
        self._patch_at = patch_at
        self._skipped = skipped

    @property
    def is_over(self) -> bool:
        """True if no further call is predicted."""
        return not self.expected

    @property
    def patches(self) -> list[tuple[str, int]]:
        """Expert and `BlockKey.patch` for each predicted call."""
        return [
            (each, self._patch_at(each, step)) for step, each in enumerate(self.expected, self.step)
        ]

    def predicted(self, visited: Sequence[int]) -> tuple[Visit, ...]:
        """Return the predicted visits from the present call on, without its blocks `visited`."""
        visits = step_visits(
            self.expected,
            self._block_counts,
            first_step=self.step,
            skipped=self._skipped(),
            patches_of_steps=[patch for _, patch in self.patches],
        )
        return visits[len(visited) :]

    def expect(self, stack: str) -> bool:
        """Correct the prediction for a call to the expert `stack`.

        Return False if it was not predicted.
        """
        if self.expected and self.expected[0] == stack:
            return True
        self.expected = predict_again(self.expected, stack)
        return False

    def begin_pass(self, stack: str = "") -> bool:
        """Start the pass in the present call, for the first time or after an error."""
        return True

    def visit(self, block: int) -> Visit:
        """Return the visit to a block in the present call."""
        expert = self.expected[0]
        return Visit(self.step, expert, block, self._patch_at(expert, self.step))

    def surprise(self) -> None:
        """Do nothing: a cache has skipped some blocks."""

    def end_pass(self, visited: Sequence[int], *, is_whole: bool = True) -> None:
        """End the pass in the present call. The call may still fail and be computed again."""

    def end_call(self) -> bool:
        """Continue with the next call."""
        self.expected = self.expected[1:]
        self.step += 1
        return True


class PassCalls:
    """Forward passes through one stack of blocks, in an order learnt from pass to pass.

    Args:
        stack: stack name.
        orders: orders in earlier passes.
        passes: predicted number of passes, at least 1. More or fewer may follow.

    Attributes:
        orders: orders in the passes so far.
        course: order in each pass of this run, as far as it went.
        passes: started passes in this run.
    """

    def __init__(self, stack: str, orders: PassOrders, passes: int) -> None:
        self.orders = orders
        self.course: list[tuple[int, ...]] = []
        self.passes = 0
        self._stack = stack
        self._expected = max(1, passes)
        self._in_pass = False

    @property
    def is_over(self) -> bool:
        """False: the sampler may always call the model again."""
        return False

    def predicted(self, visited: Sequence[int]) -> tuple[Visit, ...]:
        """Return the predicted rest of the present pass, and the passes after it."""
        # `passes` includes the present pass, and pass numbers start at 0.
        number = self.passes - self._in_pass
        after = max(0, self._expected - number - 1)
        return predict_visits(self.orders, self._stack, visited, passes_after=after, number=number)

    def predicted_passes(self, visited: Sequence[int], count: int) -> list[tuple[Visit, ...]]:
        """Return the predicted visits in each of `count` passes from the present or next one on.

        Blocks already visited in the first one are given.
        """
        number = self.passes - self._in_pass
        visits = predict_visits(
            self.orders, self._stack, visited, passes_after=count - 1, number=number
        )
        passes: list[list[Visit]] = [[] for _ in range(count)]
        for visit in visits:
            passes[visit.step - number].append(visit)
        return [tuple(each) for each in passes]

    def expect(self, stack: str) -> bool:
        """Return True: all passes are through one stack."""
        return stack == self._stack

    def begin_pass(self, stack: str = "") -> bool:
        """Start a pass."""
        self.passes += 1
        self._in_pass = True
        return True

    def visit(self, block: int) -> Visit:
        """Return the visit to a block in this pass."""
        return Visit(self.passes - 1, self._stack, block)

    def surprise(self) -> None:
        """Double the prediction if the run is longer, so few passes start with a cold block."""
        if self.passes > self._expected:
            self._expected = 2 * self.passes

    def end_pass(self, visited: Sequence[int], *, is_whole: bool = True) -> None:
        """End the pass. If it is whole, learn the order."""
        order = tuple(visited)
        if is_whole:
            self.orders = self.orders.learn(order)
        # A failed attempt has no blocks here, and gets no entry.
        if is_whole or order:
            self.course.append(order)
        else:
            self.passes -= self._in_pass  # the number is used again, as in `StackCalls`
        self._in_pass = False

    def end_call(self) -> bool:
        """End a model call, with any number of passes."""
        return True


class StackPass(NamedTuple):
    """One forward pass through a stack of blocks, as far as it went."""

    stack: str
    order: tuple[int, ...]


class StackCalls:
    """A sampler's calls, each with any number of passes through one of a model's stacks.

    The number of passes per call is learnt from call to call.

    Args:
        orders: orders in earlier passes, by stack.
        calls: stack in each predicted call. More or fewer may follow.
        course: passes of an earlier run like this one.

    Attributes:
        course: passes of this run.
        passes: number of started passes in this run.
    """

    def __init__(
        self,
        orders: Mapping[str, PassOrders],
        calls: Sequence[str],
        course: Sequence[StackPass] = (),
    ) -> None:
        self.course: list[StackPass] = []
        self.passes = 0
        self._calls = tuple(calls)
        self._known = tuple(each.stack for each in course)
        self._of_stack = {
            stack: PassCalls(stack, replace(each, course=_orders_of(stack, course)), 1)
            for stack, each in orders.items()
        }
        # A guess, to fetch blocks before the first call names the stack.
        self._stack = next(iter((*self._known, *self._calls, *orders)))
        self._in_pass = False
        self._passes_of_call = 0
        self._usual: dict[str, int] = {}
        """Passes in the latest call, by stack, and in the latest of all calls under ""."""
        self._planned: tuple[str, ...] = ()
        """Stacks in the last predicted passes, from pass number `_planned_from` on."""
        self._planned_from = 0

    @property
    def orders(self) -> dict[str, PassOrders]:
        """Orders in the passes so far, by stack."""
        return {stack: replace(each.orders, course=()) for stack, each in self._of_stack.items()}

    @property
    def is_over(self) -> bool:
        """False: the sampler may always call the model again."""
        return False

    @property
    def _number(self) -> int:
        """Number of the present pass, or of the next one."""
        return self.passes - self._in_pass

    def predicted(self, visited: Sequence[int]) -> tuple[Visit, ...]:
        """Return the predicted rest of the present pass, and the passes after it."""
        self._planned = self._stacks_ahead()
        self._planned_from = self._number
        passes: dict[str, Iterator[tuple[Visit, ...]]] = {}
        for stack, count in Counter(self._planned).items():
            # Only the first planned pass can be the present one, with blocks visited already.
            seen = visited if stack == self._planned[0] else ()
            passes[stack] = iter(self._of_stack[stack].predicted_passes(seen, count))
        return tuple(visit for stack in self._planned for visit in next(passes[stack]))

    def expect(self, stack: str) -> bool:
        """Correct the prediction for a call to `stack`. Return False if it was not predicted."""
        self._stack = stack
        self._passes_of_call = 0
        if self._calls and self._calls[0] != stack:
            self._calls = predict_again(self._calls, stack)
        return self._follows()

    def begin_pass(self, stack: str = "") -> bool:
        """Start a pass. Return False if one through another stack was predicted."""
        self._stack = stack or self._stack
        follows = self._follows()
        self.passes += 1
        self._passes_of_call += 1
        self._in_pass = True
        self._of_stack[self._stack].begin_pass()
        return follows

    def visit(self, block: int) -> Visit:
        """Return the visit to a block in this pass."""
        return self._of_stack[self._stack].visit(block)

    def surprise(self) -> None:
        """Do nothing: the next prediction includes the passes so far."""

    def end_pass(self, visited: Sequence[int], *, is_whole: bool = True) -> None:
        """End the pass. If it is whole, learn the order."""
        order = tuple(visited)
        self._of_stack[self._stack].end_pass(visited, is_whole=is_whole)
        if is_whole or order:
            self.course.append(StackPass(self._stack, order))
        if not is_whole:  # the call is computed again
            # A failed attempt has no entry in `course`, so the number is used again.
            self.passes -= self._in_pass and not order
            self._passes_of_call = 0
        self._in_pass = False

    def end_call(self) -> bool:
        """Continue with the next call, and learn how many passes this one had."""
        if self._passes_of_call:
            self._usual[self._stack] = self._usual[""] = self._passes_of_call
        self._passes_of_call = 0
        self._calls = self._calls[1:]
        planned = self._planned[self.passes - self._planned_from :]
        return not planned or _stage(planned) == _stage(self._stacks_ahead())

    def _follows(self) -> bool:
        """Return False, and forget the earlier run, if the pass was predicted for another stack."""
        place = self._number - self._planned_from
        # The slice is empty after the last planned pass: no other stack was predicted there.
        follows = self._planned[place : place + 1] in {(), (self._stack,)}
        if not follows:
            self._known = ()
        return follows

    def _stacks_ahead(self) -> tuple[str, ...]:
        """Return the predicted stack for each pass, from the present or next one on."""
        present = (self._stack,) * self._in_pass
        known = self._known[self._number + len(present) :]
        if known:
            return present + known
        stacks = list(present)
        for place, stack in enumerate(self._calls):
            usual = self._usual.get(stack, self._usual.get("", 1))
            if place == 0 and self._passes_of_call:  # the present call
                usual -= self._passes_of_call
            stacks += [stack] * usual
        if len(stacks) == len(present):  # a longer run: few passes start with a cold block
            stacks += [self._stack] * self.passes
        return tuple(stacks) or (self._stack,)


def _orders_of(stack: str, course: Sequence[StackPass]) -> tuple[tuple[int, ...], ...]:
    return tuple(each.order for each in course if each.stack == stack)


def _stage(stacks: Sequence[str]) -> tuple[str, int | None]:
    """Return the stack in the first passes, and their number if another stack follows."""
    first = stacks[0]
    # The number is None if no other stack follows, because the end is only a guess.
    length = sum(1 for _ in takewhile(first.__eq__, stacks))
    return first, None if length == len(stacks) else length
