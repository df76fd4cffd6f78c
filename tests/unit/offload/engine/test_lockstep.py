"""Calls in lockstep: results as in separate passes, half the fetches, and clean ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from torch import nn

from wanstream.offload import Lockstep, OffloadEngine, PassCalls, StreamSession, attach_offload
from wanstream.plan.programs import PassOrders
from wanstream.schema import OffloadPolicy

BLOCKS = 5
WHOLE = tuple(range(BLOCKS))
ROOM: ContextVar[str] = ContextVar("room", default="none")


class Model:
    """Block stack whose calls enter a lockstep, as a model's hooks do."""

    def __init__(self, stack: nn.ModuleList, engine: OffloadEngine) -> None:
        self.stack, self.engine = stack, engine

    def begin(self, passes: int) -> None:
        calls = PassCalls("blocks", PassOrders(blocks=BLOCKS), passes)
        self.session = StreamSession(calls, lambda: self.engine)
        self.lockstep = Lockstep(self.session, self.engine.device)
        self.session.begin()

    def call(
        self, seed: int, order: Sequence[int] = WHOLE, *, fail_at: int | None = None
    ) -> torch.Tensor:
        hidden = torch.full((1, 32), float(seed))
        for block in order:
            lane = self.lockstep.lane
            assert lane is not None
            lane.await_block(block)
            if block == fail_at:
                raise ValueError(f"block {block} failed")
            hidden = self.stack[block](hidden)
        return hidden


@pytest.fixture
def model(make_stack: Callable[..., nn.ModuleList]) -> Iterator[Model]:
    stack = make_stack(BLOCKS)
    with attach_offload(
        stack, policy=OffloadPolicy.layerwise(1), device="cpu", follow_forward=False
    ) as engine:
        yield Model(stack, engine)


def alone(stack: nn.ModuleList, seed: int, order: Sequence[int] = WHOLE) -> torch.Tensor:
    hidden = torch.full((1, 32), float(seed))
    for block in order:
        hidden = stack[block](hidden)
    return hidden


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-lane"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_share_each_visit(
    model: Model, make_stack: Callable[..., nn.ModuleList], count: int
) -> None:
    reference = make_stack(BLOCKS)
    model.begin(2)
    for _ in range(2):
        results = model.lockstep.run([partial(model.call, seed) for seed in range(count)])
        for seed, result in enumerate(results):
            assert torch.equal(result, alone(reference, seed))
    model.session.close()
    assert (model.session.visits, model.session.fetches, model.session.recompiled) == (10, 10, 0)
    assert not lanes()


def test_calls_that_skip_blocks_wait_for_those_that_do_not(
    model: Model, make_stack: Callable[..., nn.ModuleList]
) -> None:
    reference, few = make_stack(BLOCKS), (0, 4)
    model.begin(1)
    whole, skipping = model.lockstep.run([partial(model.call, 1), partial(model.call, 2, few)])
    model.session.close()
    assert torch.equal(whole, alone(reference, 1))
    assert torch.equal(skipping, alone(reference, 2, few))
    assert (model.session.visits, model.session.recompiled) == (5, 0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("block", [0, 2, 4])
def test_an_error_of_one_call_ends_all(model: Model, failing: int, block: int) -> None:
    calls = [
        partial(model.call, seed, fail_at=block if seed == failing else None) for seed in range(3)
    ]
    model.begin(1)
    with pytest.raises(ValueError, match=f"block {block} failed") as raised:
        model.lockstep.run(calls)
    model.session.close(raised.value)
    assert not lanes()
    assert not model.engine.running
    assert model.lockstep.lane is None


def test_a_call_that_catches_every_exception_ends_too(model: Model) -> None:
    def stubborn() -> torch.Tensor:
        try:
            return model.call(0)
        except BaseException:  # noqa: BLE001 - as code of other packs does
            return model.call(0)

    model.begin(1)
    with pytest.raises(ValueError, match="block 2 failed") as raised:
        model.lockstep.run([partial(model.call, 1, fail_at=2), stubborn])
    model.session.close(raised.value)
    assert not lanes()


def test_an_error_keeps_no_memory_without_garbage_collection(model: Model) -> None:
    activations: list[weakref.ref[torch.Tensor]] = []

    def call(*, fails: bool) -> torch.Tensor:
        activation = torch.ones(1, 32)
        activations.append(weakref.ref(activation))
        result = model.call(0, fail_at=2 if fails else None)
        return result + activation

    gc.disable()
    try:
        model.begin(1)
        with pytest.raises(ValueError, match="block 2 failed"):
            model.lockstep.run([partial(call, fails=True), partial(call, fails=False)])
        model.session.close()
        assert [activation() for activation in activations] == [None, None]
    finally:
        gc.enable()


def test_a_pass_after_an_error_is_right(
    model: Model, make_stack: Callable[..., nn.ModuleList]
) -> None:
    reference = make_stack(BLOCKS)
    model.begin(1)
    with pytest.raises(ValueError, match="block 2 failed"):
        model.lockstep.run([partial(model.call, 0), partial(model.call, 1, fail_at=2)])
    results = model.lockstep.run([partial(model.call, 0), partial(model.call, 1)])
    model.session.close()
    for seed, result in enumerate(results):
        assert torch.equal(result, alone(reference, seed))


def test_threads_have_the_modes_and_context_variables_of_the_caller(model: Model) -> None:
    def modes() -> tuple[object, ...]:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return (
            torch.is_inference_mode_enabled(),
            ROOM.get(),
            autocast,
            torch.get_default_device().type,
        )

    ROOM.set("ours")
    model.begin(2)
    with torch.inference_mode():
        assert model.lockstep.run([modes, modes]) == [(True, "ours", False, "cpu")] * 2
    with torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        assert model.lockstep.run([modes]) == [(False, "ours", torch.float16, "meta")]
    model.session.close()
    assert model.lockstep.lane is None, "outside a call nothing waits"
