"""Sampler calls on two experts: the switch is predicted, and both share one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import pytest
import torch
from torch import nn

from wanstream.offload import OffloadEngine, StackCalls, StackPass, StreamSession, attach_offload
from wanstream.offload.sources import TensorSource, joined_source
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, PassOrders
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder

BLOCKS = 4
H, L = "high", "low"
ORDERS = {stack: PassOrders(blocks=BLOCKS) for stack in (H, L)}


class NoChanges:
    """Session policy without changes."""

    def revised(self, record: object) -> None:
        return None


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> dict[str, nn.ModuleList]:
    return {H: make_stack(BLOCKS), L: make_stack(BLOCKS)}


@pytest.fixture
def engine(stacks: dict[str, nn.ModuleList]) -> Iterator[OffloadEngine]:
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(1), device="cpu", follow_forward=False
    ) as engine:
        yield engine


def run(
    engine: OffloadEngine,
    calls: Sequence[tuple[str, int]],
    predicted: Sequence[str],
    course: Sequence[StackPass] = (),
) -> tuple[StreamSession, StackCalls]:
    """Make calls (an expert and a pass count each), and return the closed session."""
    source = StackCalls(ORDERS, predicted, course)
    session = StreamSession(
        source, lambda: engine, policy=NoChanges(), recorder=Recorder(torch.device("cpu"))
    )
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
def test_a_run_that_is_repeated_has_no_surprise(
    engine: OffloadEngine, calls: list[tuple[str, int]], surprises: int
) -> None:
    first, source = run(engine, calls, [H] * 3 + [L] * 2)
    assert first.recompiled == surprises
    assert [each.stack for each in source.course] == [
        s for s, passes in calls for _ in range(passes)
    ]
    again, _ = run(engine, calls, [H] * 3 + [L] * 2, source.course)
    assert again.recompiled == 0
    assert again.visits == BLOCKS * len(source.course)
    assert again.fetches <= again.visits


def test_the_passes_of_a_call_are_learnt_before_the_switch() -> None:
    source = StackCalls(ORDERS, [H] * 3 + [L] * 2)
    source.predicted(())
    assert source.expect(H)
    for _ in range(2):
        assert source.begin_pass(H)
        source.end_pass(range(BLOCKS))
    assert not source.end_call()
    stacks = [visit.expert for visit in source.predicted(())[::BLOCKS]]
    assert [(stack, len([*each])) for stack, each in groupby(stacks)] == [(H, 4), (L, 4)]


def test_a_joined_source_reads_each_stack_from_its_own(stacks: dict[str, nn.ModuleList]) -> None:
    own = {name: ModuleSource({"model": list(stack)}) for name, stack in stacks.items()}
    in_memory = joined_source(own)
    assert isinstance(in_memory, TensorSource)

    class Other:
        """Source outside memory."""

        formats = own[L].formats

        def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
            own[L].read_block(key, into)

    joined = joined_source({H: own[H], L: Other()})
    for key, form in joined.formats.items():
        read = [torch.empty(form.stored.nbytes, dtype=torch.uint8) for _ in range(2)]
        joined.read_block(key, read[0])
        in_memory.read_block(key, read[1])
        assert torch.equal(*read)
