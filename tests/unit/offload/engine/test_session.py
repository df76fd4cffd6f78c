"""Forward-pass sessions: every block is there, and later passes fetch nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from wanstream.offload import OffloadEngine, PassCalls, StreamSession, attach_offload
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import PassOrders
from wanstream.schema import OffloadPolicy, StateError
from wanstream.tests.support.offload_fixtures import SlowSource

BLOCKS = 6
POLICIES = [
    OffloadPolicy.layerwise(1),
    OffloadPolicy.layerwise(3),
    OffloadPolicy.block_swap(4),
    OffloadPolicy.resident(),
]


@pytest.fixture
def reference(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(BLOCKS)


@pytest.fixture
def attached(
    make_stack: Callable[..., nn.ModuleList],
) -> Iterator[Callable[..., tuple[nn.ModuleList, OffloadEngine]]]:
    engines: list[OffloadEngine] = []

    def attach(policy: OffloadPolicy, **source: object) -> tuple[nn.ModuleList, OffloadEngine]:
        stack = make_stack(BLOCKS)
        engines.append(
            attach_offload(stack, policy=policy, device="cpu", follow_forward=False, **source)
        )
        return stack, engines[-1]

    yield attach
    for engine in engines:
        engine.detach()


class Passes:
    """Consecutive sessions: each starts with the orders learned before."""

    def __init__(self, engine: OffloadEngine, orders: PassOrders | None = None) -> None:
        self.orders = orders or PassOrders(blocks=BLOCKS)
        self._engine = engine

    def begin(self, passes: int) -> None:
        self.calls = PassCalls("blocks", self.orders, passes)
        self.session = StreamSession(self.calls, lambda: self._engine)
        self.session.begin()

    def close(self, error: BaseException | None = None) -> None:
        self.session.close(error)
        self.orders = self.calls.orders


def one_pass(passes: Passes, stack: nn.ModuleList, order: Sequence[int]) -> torch.Tensor:
    passes.session.begin_pass()
    hidden = torch.ones(1, 32)
    for block in order:
        with passes.session.visit(block):
            hidden = stack[block](hidden)
    passes.session.end_pass()
    return hidden


def expected(stack: nn.ModuleList, order: Sequence[int]) -> torch.Tensor:
    hidden = torch.ones(1, 32)
    for block in order:
        hidden = stack[block](hidden)
    return hidden


WHOLE, INTERLEAVED = (0, 1, 2, 3, 4, 5), (0, 4, 1, 2, 5, 3)
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


@pytest.mark.parametrize("passes", COURSES.values(), ids=COURSES)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_block_of_every_pass_has_its_weights(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]],
    reference: nn.ModuleList,
    policy: OffloadPolicy,
    passes: list[Sequence[int]],
) -> None:
    stack, engine = attached(policy)
    course = Passes(engine)
    for _ in range(2):
        course.begin(4)
        for order in passes:
            assert torch.equal(one_pass(course, stack, order), expected(reference, order))
        course.close()
        assert not engine.running
        assert course.session.visits == sum(map(len, passes))


@pytest.mark.parametrize("order", [WHOLE, INTERLEAVED, (0, 1, 4, 5)], ids=str)
def test_a_course_like_the_one_before_needs_one_program_and_one_fetch_per_visit(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]], order: Sequence[int]
) -> None:
    stack, engine = attached(OffloadPolicy.layerwise(1))
    course = Passes(engine)
    course.begin(3)
    for _ in range(3):
        one_pass(course, stack, order)
    course.close()
    assert (course.session.recompiled == 0) == (order == WHOLE)
    course.begin(3)
    for _ in range(3):
        one_pass(course, stack, order)
    course.close()
    assert course.session.recompiled == 0
    kept = len(engine.buffers)  # blocks left in buffers by the course before
    assert len(order) * 3 - kept <= course.session.fetches <= len(order) * 3


@pytest.mark.parametrize("passes", COURSES.values(), ids=COURSES)
def test_a_course_that_is_repeated_needs_one_program(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]], passes: list[Sequence[int]]
) -> None:
    stack, engine = attached(OffloadPolicy.layerwise(1))
    first = Passes(engine)
    first.begin(1)
    for order in passes:
        one_pass(first, stack, order)
    first.close()
    again = Passes(engine, replace(first.orders, course=tuple(first.calls.course)))
    again.begin(len(passes))
    for order in passes:
        one_pass(again, stack, order)
    again.close()
    assert again.session.recompiled == 0
    assert again.session.fetches <= again.session.visits == sum(map(len, passes))


def test_passes_beyond_the_prediction_double_it(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]],
) -> None:
    stack, engine = attached(OffloadPolicy.layerwise(1))
    course = Passes(engine)
    course.begin(1)
    for _ in range(16):
        one_pass(course, stack, WHOLE)
    course.close()
    assert course.session.recompiled == 3  # at passes 2, 5 and 11


def test_an_error_in_a_block_ends_the_course_and_the_next_one_is_right(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]], reference: nn.ModuleList
) -> None:
    stack, engine = attached(OffloadPolicy.layerwise(2))
    course = Passes(engine)
    threads = threading.active_count()
    course.begin(3)
    one_pass(course, stack, WHOLE)
    course.session.begin_pass()
    course.session.visit(0)
    course.close(RuntimeError("out of memory"))
    assert threading.active_count() == threads
    assert not engine.running
    course.begin(1)
    assert torch.equal(one_pass(course, stack, WHOLE), expected(reference, WHOLE))
    course.close()


def test_a_pass_that_was_given_up_is_computed_again(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]], reference: nn.ModuleList
) -> None:
    stack, engine = attached(OffloadPolicy.layerwise(1))
    course = Passes(engine)
    course.begin(3)
    one_pass(course, stack, WHOLE)
    course.session.begin_pass()
    with course.session.visit(0):
        pass
    for _ in range(2):
        assert torch.equal(one_pass(course, stack, WHOLE), expected(reference, WHOLE))
    assert course.calls.orders.seen == (WHOLE,), "the pass that was given up is not learnt"
    course.close()


def test_a_block_that_cannot_be_read_raises_in_its_visit(
    make_stack: Callable[..., nn.ModuleList],
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]],
) -> None:
    source = SlowSource(ModuleSource({"blocks": list(make_stack(BLOCKS))}), seed=1)
    source.fail_at = 3
    stack, engine = attached(OffloadPolicy.layerwise(1), source=source)
    course = Passes(engine)
    course.begin(1)
    with pytest.raises(SourceError, match="went away"):
        one_pass(course, stack, WHOLE)
    course.close()
    assert not engine.running


def test_calls_in_a_wrong_order_raise(
    attached: Callable[..., tuple[nn.ModuleList, OffloadEngine]],
) -> None:
    _, engine = attached(OffloadPolicy.layerwise(1))
    course = Passes(engine)
    with pytest.raises(StateError, match="not entered"):
        StreamSession(PassCalls("blocks", course.orders, 1), lambda: engine).begin_pass()
    course.begin(1)
    with pytest.raises(StateError, match="waiting for a call"):
        course.session.visit(0)
    course.session.begin_pass()
    course.session.visit(0)
    with pytest.raises(StateError, match="in a block"):
        course.session.visit(1)
    course.close()
    course.close()
