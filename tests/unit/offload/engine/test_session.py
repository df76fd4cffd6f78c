"""Forward-pass sessions: every block is there, and later passes fetch nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from wanstream.offload import PassCalls, StreamSession
from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import PassOrders
from wanstream.schema import OffloadPolicy, StateError
from wanstream.tests.support.offload.streaming import BLOCKS, ONES, attach, plainly

LAYERWISE = [OffloadPolicy.layerwise(1), OffloadPolicy.layerwise(3)]
POLICIES = [*LAYERWISE, OffloadPolicy.block_swap(4), OffloadPolicy.resident()]


class Passes:
    """Consecutive sessions: each starts with the orders learned before."""

    def __init__(self, engine, stacks, orders=None) -> None:
        self.orders = orders or PassOrders(blocks=BLOCKS)
        self._engine = engine
        self._stack = stacks["high"]

    def begin(self, passes: int) -> None:
        self.calls = PassCalls("high", self.orders, passes)
        self.session = StreamSession(self.calls, lambda: self._engine)
        self.session.begin()

    def close(self, error: BaseException | None = None) -> None:
        self.session.close(error)
        self.orders = self.calls.orders

    def one(self, order: Sequence[int]) -> torch.Tensor:
        self.session.begin_pass()
        hidden = ONES
        for block in order:
            with self.session.visit(block):
                hidden = self._stack[block](hidden)
        self.session.end_pass()
        return hidden

    def course(self, passes: Sequence[Sequence[int]], predicted: int) -> list[torch.Tensor]:
        """Return the results of a whole session."""
        self.begin(predicted)
        results = [self.one(order) for order in passes]
        self.close()
        return results


def plain(stacks: dict, order: Sequence[int]) -> torch.Tensor:
    return plainly({"": [stacks["high"][block] for block in order]}, [""])


WHOLE = (0, 1, 2, 3, 4, 5)
INTERLEAVED = (0, 4, 1, 2, 5, 3)
COURSES = {
    "in order": [WHOLE] * 4,
    "interleaved": [INTERLEAVED] * 4,
    "every second pass skipped": [WHOLE, (), WHOLE, ()],
    "first block only in every second pass": [WHOLE, (0,), WHOLE, (0,)],
    "two blocks never": [(0, 1, 4, 5)] * 4,
    "a block twice": [(0, 1, 1, 2, 3, 4, 5)] * 4,
    "more passes than predicted": [WHOLE] * 9,
    "fewer": [WHOLE],
}


@pytest.mark.parametrize(("course", "policy"), [*zip(COURSES, POLICIES * 2, strict=True)], ids=str)
def test_every_block_of_every_pass_has_its_weights(stacks, policy, course):
    expected = [plain(stacks, order) for order in COURSES[course]]
    with attach(stacks, policy) as engine:
        passes = Passes(engine, stacks)
        for _ in range(2):
            assert all(map(torch.equal, passes.course(COURSES[course], 4), expected))
            assert not engine.running
            assert passes.session.visits == sum(map(len, COURSES[course]))


@pytest.mark.parametrize("course", COURSES)
def test_a_repeated_course_needs_one_program(stacks, course):
    with attach(stacks) as engine:
        first = Passes(engine, stacks)
        first.course(COURSES[course], 1)
        again = Passes(engine, stacks, replace(first.orders, course=tuple(first.calls.course)))
        again.course(COURSES[course], len(COURSES[course]))
        assert again.session.recompiled == 0
        assert again.session.fetches <= again.session.visits == sum(map(len, COURSES[course]))


def test_passes_beyond_the_prediction_double_it(stacks):
    with attach(stacks) as engine:
        passes = Passes(engine, stacks)
        passes.course([WHOLE] * 16, 1)
        assert passes.session.recompiled == 3  # at passes 2, 5 and 11


def test_an_abandoned_pass_and_an_error_disturb_no_other_pass(stacks):
    expected = plain(stacks, WHOLE)
    threads = threading.active_count()
    with attach(stacks, OffloadPolicy.layerwise(2)) as engine:
        passes = Passes(engine, stacks)
        passes.begin(3)
        passes.one(WHOLE)
        passes.session.begin_pass()
        with passes.session.visit(0):
            pass
        for _ in range(2):
            assert torch.equal(passes.one(WHOLE), expected)
        assert passes.calls.orders.seen == (WHOLE,), "the abandoned pass is not learned"
        passes.session.begin_pass()
        passes.session.visit(0)
        passes.close(RuntimeError("out of memory"))
        assert threading.active_count() == threads
        assert not engine.running
        assert torch.equal(*passes.course([WHOLE], 1), expected)


def test_an_unreadable_block_raises_in_its_visit(stacks, slow):
    slow.fail_at = 3
    with attach(stacks, source=slow) as engine:
        passes = Passes(engine, stacks)
        passes.begin(1)
        with pytest.raises(SourceError, match="went away"):
            passes.one(WHOLE)
        passes.close()
        assert not engine.running


def test_calls_in_a_wrong_order_raise(stacks):
    with attach(stacks) as engine:
        passes = Passes(engine, stacks)
        with pytest.raises(StateError, match="not entered"):
            StreamSession(PassCalls("high", passes.orders, 1), lambda: engine).begin_pass()
        passes.begin(1)
        with pytest.raises(StateError, match="waiting for a call"):
            passes.session.visit(0)
        passes.session.begin_pass()
        passes.session.visit(0)
        with pytest.raises(StateError, match="in a block"):
            passes.session.visit(1)
        passes.close()
        passes.close()
