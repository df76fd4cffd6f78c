"""Sampler calls on two experts: the switch is predicted, and both share one pool."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import pytest

from wanstream.offload import StackCalls, StreamSession
from wanstream.plan.programs import PassOrders
from wanstream.telemetry import Recorder
from wanstream.tests.support.offload.streaming import BLOCKS, CPU, attach

H = "high"
L = "low"
ORDERS = {stack: PassOrders(blocks=BLOCKS) for stack in (H, L)}
PREDICTED = [H] * 3 + [L] * 2


def run(engine, calls, course=()) -> tuple[StreamSession, StackCalls]:
    """Make calls (an expert and a pass count each), and return the closed session."""
    source = StackCalls(ORDERS, PREDICTED, course)
    unchanged = SimpleNamespace(revised=lambda record: None)
    session = StreamSession(source, lambda: engine, policy=unchanged, recorder=Recorder(CPU))
    session.begin()
    for step, (stack, passes) in enumerate(calls):
        for attempt in session.attempts(stack, step, 0.5):
            with attempt:
                for _ in range(passes):
                    session.begin_pass(stack)
                    for block in range(BLOCKS):
                        with session.visit(block):
                            pass
                    session.end_pass()
    session.close()
    return session, source


COURSES = {
    "as predicted": ([(H, 1)] * 3 + [(L, 1)] * 2, 0),
    # Only the first call's second pass was not predicted.
    "two passes per call": ([(H, 2)] * 3 + [(L, 2)] * 2, 1),
    "one pass from the second call on": ([(H, 2)] + [(H, 1)] * 2 + [(L, 1)] * 2, 2),
    "skipped call": ([(H, 1), (H, 0), (H, 1), (L, 1), (L, 1)], 1),
    "earlier switch": ([(H, 1)] * 2 + [(L, 1)] * 2, 1),
    "back and forth": ([(H, 1), (L, 1), (H, 1), (L, 1)], 3),
    "one expert": ([(L, 1)] * 2, 1),
}


@pytest.mark.parametrize(("calls", "surprises"), COURSES.values(), ids=COURSES)
def test_a_repeated_run_has_no_surprise(stacks, calls, surprises):
    with attach(stacks) as engine:
        first, source = run(engine, calls)
        assert first.recompiled == surprises
        made = [stack for stack, passes in calls for _ in range(passes)]
        assert [each.stack for each in source.course] == made
        again, _ = run(engine, calls, source.course)
        assert again.recompiled == 0
        assert again.visits == BLOCKS * len(source.course)
        assert again.fetches <= again.visits


def test_passes_per_call_are_learned_before_the_switch():
    source = StackCalls(ORDERS, PREDICTED)
    source.predicted(())
    assert source.expect(H)
    for _ in range(2):
        assert source.begin_pass(H)
        source.end_pass(range(BLOCKS))
    assert not source.end_call()
    stacks = [visit.expert for visit in source.predicted(())[::BLOCKS]]
    assert [(stack, len([*each])) for stack, each in groupby(stacks)] == [(H, 4), (L, 4)]


def test_passes_after_the_first_one_are_predicted_like_it():
    source = StackCalls(ORDERS, PREDICTED)
    source.begin_pass(H)
    order = [*range(1, BLOCKS), 0]
    blocks = [visit.block for visit in source.predicted(order[:1]) if visit.expert == H]
    assert blocks == [*order[1:], *order, *order]


def test_a_repeated_pass_has_the_number_of_the_failed_one():
    source = StackCalls(ORDERS, PREDICTED)
    for _ in range(2):
        source.begin_pass(H)
        assert source.visit(0).step == source.predicted(())[0].step == 0
        source.end_pass((), is_whole=False)
