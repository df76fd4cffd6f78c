"""Engine scenarios in several execution orders, and calls in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from wanstream.offload import Lockstep, PassCalls, StreamSession
from wanstream.offload.core import pages
from wanstream.plan.programs import PassOrders
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.device_scenarios import (
    BLOCK_SWAP,
    COUNT,
    DEEP,
    KEYS,
    KINDS,
    LAYERWISE,
    PARTLY_PINNED,
    PINNED,
    RESIDENT,
    SCENARIOS,
    Case,
)


# On the checked device a test's name is its seed.
@pytest.mark.parametrize("order", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_visit_finds_its_block(gpu, name, order):
    if order:
        gpu.need_fake("a real device takes no order from us")
    SCENARIOS[name](gpu)


@pytest.mark.parametrize("kind", ["raw", "fp8", "patched"])
def test_blocks_locked_in_pieces_are_copied_without_a_wait(gpu, monkeypatch, kind):
    machine = gpu.need_fake("it makes the pieces small, and logs host waits")
    monkeypatch.setattr(pages, "LOCK_BYTES", 64)
    pinned = Case(gpu, PINNED, **KINDS[kind])
    pinned.run()
    pinned.detach()
    assert "offload/core/pages.py copy_to_device" not in machine.host_waits


def test_engines_after_each_other_use_the_same_streams(gpu):
    machine = gpu.need_fake("it counts streams")
    counts = list[int]()
    for _ in range(40):
        case = Case(gpu, patched=True, fp8=True)
        case.run(1)
        case.detach()
        counts.append(len(machine.devices[0].streams))
    assert counts[3] == counts[-1]


def test_engines_side_by_side_share_no_stream(gpu):
    Case(gpu).detach()  # the streams are idle
    cases = [Case(gpu), Case(gpu, fp8=True)]
    streams = [stream for case in cases for stream in case.engine.backend._streams]
    assert len(set(map(id, streams))) == len(streams) == 4
    for case in cases:
        case.run()
    for case in cases:
        case.detach()


@pytest.mark.parametrize(("policy", "residents"), [(LAYERWISE, 0), (DEEP, 0), (RESIDENT, COUNT)])
def test_engines_in_turns_need_the_buffers_of_one(gpu, policy, residents):
    device = gpu.need_fake("it counts memory").devices[0]
    cases = [Case(gpu, policy), Case(gpu, policy)]
    cases[0].run()
    cases[0].check()
    kept = residents * cases[0].source.formats[KEYS[0]].computed.nbytes
    reserved = device.reserved
    for at in (1, 0, 1):
        other = cases[1 - at].engine
        assert other.loaded_bytes - other.release_idle_buffers() == other.loaded_bytes == kept
        cases[at].run(delay=1)
        assert device.reserved == reserved + kept
        cases[at].check()
    cases[0].engine.allocate_buffers()
    assert cases[0].engine.release_idle_buffers() == 0, "they are for the next run"
    for case in cases:
        case.detach()


WHOLE = tuple(range(COUNT))
CASES = {
    "layerwise": {"policy": LAYERWISE},
    "one buffer": {"policy": OffloadPolicy.layerwise(0)},
    "deep": {"policy": DEEP, "fp8": True},
    "block swap": {"policy": BLOCK_SWAP},
    "partly pinned": {"policy": PARTLY_PINNED},
}


class Shared:
    """A case's calls in lockstep, and a session with two predicted passes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        calls = PassCalls("high", PassOrders(blocks=COUNT), 2)
        self.session = StreamSession(calls, lambda: case.engine)
        self.session.begin()
        self.lockstep = Lockstep(self.session, case.gpu.device)

    def call(self, lane: int, order: Sequence[int], fail_at: int | None = None) -> torch.Tensor:
        """Add up what the blocks have, in work between the visits as well as in them."""
        total = torch.zeros(1, device=self.case.gpu.device)
        for block in order:
            self.lockstep.lane.await_block(block)
            assert self.case.gpu.runtime.current_index() == self.case.gpu.device.index
            if (block + lane) % 2 == 0:
                self.case.gpu.delay()
            weight = self.case.blocks[block].weight.clone()
            self.case.seen.append((KEYS[block], 0, weight))
            total = total + weight.flatten()[:1].float()
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
