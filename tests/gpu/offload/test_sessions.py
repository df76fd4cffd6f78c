"""Sessions of forward passes and lockstep calls on a device with streams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from wanstream.offload import Lockstep, PassCalls, StreamSession
from wanstream.plan.programs import PassOrders
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.offload.device_scenarios import (
    BLOCK_SWAP,
    COUNT,
    DEEP,
    LAYERWISE,
    PARTLY_PINNED,
    Case,
)

WHOLE = tuple(range(COUNT))
PASSES = [WHOLE, (0, 2, 1, 3), (0,), WHOLE, (0, 0, 3), (), WHOLE]
"""Passes in other orders than predicted. Each makes programs that keep the blocks in the buffers.
"""

CASES = {
    "layerwise": {"policy": LAYERWISE},
    "one buffer": {"policy": OffloadPolicy.layerwise(0)},
    "deep": {"policy": DEEP, "fp8": True},
    "block swap": {"policy": BLOCK_SWAP},
    "partly pinned": {"policy": PARTLY_PINNED},
}


def see(case: Case, block: int, *, delay: bool) -> None:
    """Read a block's weights, which the case compares at the end."""
    if delay:
        case.gpu.delay()
    key = next(key for key in case.source.formats if key.block == block)
    case.seen.append((key, 0, case.blocks[block].weight.clone()))


def begun(case: Case, recorder: Recorder | None = None) -> StreamSession:
    """Return a begun session for the case and two predicted passes."""
    calls = PassCalls("high", PassOrders(blocks=COUNT), 2)
    session = StreamSession(calls, lambda: case.engine, recorder=recorder)
    session.begin()
    return session


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_passes_in_other_orders_than_predicted_find_their_blocks(gpu, how):
    case, recorder = Case(gpu, **how), Recorder(gpu.device)
    with torch.inference_mode(), case._ended():
        session = begun(case, recorder)
        for number, order in enumerate(PASSES):
            with recorder.step(number, "high"):
                session.begin_pass()
                for block in order:
                    with session.visit(block):
                        see(case, block, delay=block % 2 == 0)
                session.end_pass()
        session.close()
    case.detach()


class Shared:
    """A case's calls in lockstep."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.session = begun(case)
        self.lockstep = Lockstep(self.session, case.gpu.device)

    def call(self, lane: int, order: Sequence[int], fail_at: int | None = None) -> torch.Tensor:
        """Add up what the blocks have, in work between the visits as well as in them."""
        total = torch.zeros(1, device=self.case.gpu.device)
        for block in order:
            self.lockstep.lane.await_block(block)
            assert self.case.gpu.runtime.current_index() == self.case.gpu.device.index
            see(self.case, block, delay=(block + lane) % 2 == 0)
            total = total + self.case.blocks[block].weight.flatten()[:1].float()
            if block == fail_at:
                raise ValueError("made up")
        return total


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_calls_in_lockstep_find_their_blocks(gpu, how):
    case = Case(gpu, **how)
    stream = gpu.runtime.stream()
    with torch.inference_mode(), gpu.runtime.on_stream(stream), case._ended():
        shared = Shared(case)
        both = [partial(shared.call, lane, WHOLE) for lane in range(2)]
        totals = [shared.lockstep.run(both) for _ in range(2)]
        shared.lockstep.run([both[0], partial(shared.call, 1, (0, 3))])
        with pytest.raises(ValueError, match="made up"):
            shared.lockstep.run([both[0], partial(shared.call, 1, WHOLE, 1)])
        shared.lockstep.run(both)
        shared.session.close()
        found = [total.cpu() for each in totals for total in each]
    expected = sum(case.source.decoded(key).flatten()[:1].float() for key in case.source.formats)
    assert all(torch.equal(total, found[0]) for total in found)
    assert torch.allclose(found[0], expected, rtol=1e-4)
    case.detach()
