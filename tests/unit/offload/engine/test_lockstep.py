"""Calls in lockstep: results as in separate passes, half the fetches, and clean ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from torch import nn

from wanstream.offload import Lockstep, OffloadEngine, PassCalls, StreamSession
from wanstream.plan.programs import PassOrders
from wanstream.tests.support.offload.streaming import BLOCKS, ONES, attach, plainly

WHOLE = tuple(range(BLOCKS))
ROOM: ContextVar[str] = ContextVar("room", default="none")


class Model:
    """Block stack whose calls enter a lockstep, as a model's hooks do."""

    def __init__(self, stack: nn.ModuleList, engine: OffloadEngine) -> None:
        self.stack = stack
        self.engine = engine

    def begin(self, passes: int) -> None:
        calls = PassCalls("high", PassOrders(blocks=BLOCKS), passes)
        self.session = StreamSession(calls, lambda: self.engine)
        self.lockstep = Lockstep(self.session, self.engine.device)
        self.session.begin()

    def call(self, seed, order=WHOLE, *, fail_at=None) -> torch.Tensor:
        hidden = float(seed) * ONES
        for block in order:
            lane = self.lockstep.lane
            lane.await_block(block)
            assert lane.block == block, "hooks of a model read it"
            if block == fail_at:
                raise ValueError(f"block {block} failed")
            hidden = self.stack[block](hidden)
        return hidden

    def fail(self, *calls: object, block: int = 2) -> ValueError:
        """Run calls with a failing one, and return the error."""
        with pytest.raises(ValueError, match=f"block {block} failed") as raised:
            self.lockstep.run(calls)
        return raised.value

    def is_over(self) -> bool:
        lanes = [thread for thread in threading.enumerate() if thread.name == "wanstream-lane"]
        return not lanes and not self.engine.running and self.lockstep.lane is None


@pytest.fixture
def model(stacks) -> Iterator[Model]:
    with attach(stacks) as engine:
        yield Model(stacks["high"], engine)


@pytest.fixture
def alone(make_stack):
    """Compute one call without a lockstep."""
    stack = make_stack(BLOCKS, seed=1)

    def compute(seed: int, order: Sequence[int] = WHOLE) -> torch.Tensor:
        return plainly({"": [stack[block] for block in order]}, [""], float(seed) * ONES)

    return compute


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_share_each_visit(model, alone, count):
    model.begin(2)
    for _ in range(2):
        results = model.lockstep.run([partial(model.call, seed) for seed in range(count)])
        assert all(torch.equal(result, alone(seed)) for seed, result in enumerate(results))
    model.session.close()
    session = model.session
    assert (session.visits, session.fetches, session.recompiled) == (2 * BLOCKS, 2 * BLOCKS, 0)
    assert model.is_over()


def test_calls_that_skip_blocks_wait_for_the_others(model, alone):
    few = (0, 4)
    model.begin(1)
    whole, skipping = model.lockstep.run([partial(model.call, 1), partial(model.call, 2, few)])
    model.session.close()
    assert torch.equal(whole, alone(1))
    assert torch.equal(skipping, alone(2, few))
    assert (model.session.visits, model.session.recompiled) == (BLOCKS, 0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("block", [0, 2, BLOCKS - 1])
def test_an_error_of_one_call_ends_all(model, failing, block):
    fail_at = [block if seed == failing else None for seed in range(3)]
    model.begin(1)
    calls = [partial(model.call, seed, fail_at=at) for seed, at in enumerate(fail_at)]
    model.session.close(model.fail(*calls, block=block))
    assert model.is_over()


def test_a_call_that_catches_every_exception_ends_too(model):
    def stubborn() -> torch.Tensor:
        try:
            return model.call(0)
        except BaseException:  # noqa: BLE001 - as code of other packs does
            return model.call(0)

    model.begin(1)
    model.session.close(model.fail(partial(model.call, 1, fail_at=2), stubborn))
    assert model.is_over()


def test_an_error_keeps_no_memory_without_garbage_collection(model):
    activations: list[weakref.ref[torch.Tensor]] = []

    def call(*, fails: bool) -> torch.Tensor:
        activation = torch.ones(1, 32)
        activations.append(weakref.ref(activation))
        return model.call(0, fail_at=2 if fails else None) + activation

    gc.disable()
    try:
        model.begin(1)
        with pytest.raises(ValueError, match="block 2 failed"):  # `fail` would keep the error
            model.lockstep.run([partial(call, fails=True), partial(call, fails=False)])
        model.session.close()
        assert [activation() for activation in activations] == [None, None]
    finally:
        gc.enable()


def test_threads_have_the_callers_modes_and_context(model):
    def modes() -> tuple[object, ...]:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        device = torch.get_default_device().type
        return torch.is_inference_mode_enabled(), ROOM.get(), autocast, device

    ROOM.set("ours")
    model.begin(2)
    with torch.inference_mode():
        assert model.lockstep.run([modes, modes]) == [(True, "ours", False, "cpu")] * 2
    with torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        assert model.lockstep.run([modes]) == [(False, "ours", torch.float16, "meta")]
    model.session.close()
    assert model.is_over(), "outside a call nothing waits"
