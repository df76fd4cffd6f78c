"""Late kernel and copy errors have the block and the step in the message."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from wanstream.devices import LateDeviceError, is_broken_device
from wanstream.offload import attach_offload
from wanstream.offload.core.buffers import BlockBuffer
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.cpu import CpuBackend
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "AcceleratorError"),
    reason="torch before 2.8 has no class for errors of a device",
)

ILLEGAL = "CUDA error: an illegal memory access was encountered"
LAYERWISE = OffloadPolicy.layerwise(1)


class Broken:
    """Callable that raises a device error after `at` calls."""

    def __init__(self, call: Callable[..., object], at: int, error: Exception) -> None:
        self.call, self.left, self.error = call, at, error

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.call(*args, **kwargs)


def run(stack: nn.ModuleList, broken: Callable[[], object], at: int | None) -> None:
    """Stream two passes.

    `broken` is called in the visit `at`, or behind it with a negative number.
    """
    source = ModuleSource({"high": stack})
    with (
        attach_offload(
            {"high": stack}, policy=LAYERWISE, device="cpu", source=source, follow_forward=False
        ) as engine,
        engine.run(step_visits(["high"] * 2, engine.block_counts)) as active,
    ):
        for number, visit in enumerate(active.program.visits):
            with active.visit(*visit):
                if number == at:
                    broken()
            if at is not None and number == -at:
                broken()


PLACES = {
    "kernel": (4, None, "block 1 of 'high', step 1"),
    "between visits": (-2, None, "the end of block 2 of 'high', step 0"),
    "fetch": (None, (CpuBackend, "copy_in", 4), "the fetch of block 1 of 'high', step 1"),
    "end of a visit": (None, (BlockBuffer, "release", 2), "block 2 of 'high', step 0"),
    "start of a visit": (None, (BlockBuffer, "acquire", 3), "block 0 of 'high', step 1"),
    "start of the run": (None, (CpuBackend, "begin_run", 0), "the start of a run"),
    "end of the run": (None, (CpuBackend, "end_run", 0), "the end of block 2 of 'high', step 1"),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("blocking", ["0", "1"])
def test_the_place_is_named(
    make_stack: Callable[..., nn.ModuleList],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    blocking: str,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    at, call, place = PLACES[case]
    error = torch.AcceleratorError(
        f"{ILLEGAL}\nCUDA kernel errors might be asynchronously reported"
    )
    if call is not None:
        owner, name, number = call
        broken = Broken(getattr(owner, name), number, error)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: broken(*args, **kwargs))
    words = (
        f"{ILLEGAL}, at {place}"
        if blocking == "1"
        else f"{ILLEGAL}, surfaced at {place}: start again with CUDA_LAUNCH"
    )
    with pytest.raises(LateDeviceError, match=re.escape(words)) as raised:
        run(make_stack(3), Broken(lambda: None, 0, error), at)
    assert raised.value.__cause__ is error
    assert is_broken_device(raised.value)


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (ILLEGAL, "usable by a new process only"),
        (
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "short of memory",
        ),
    ],
)
def test_an_error_of_a_library_need_not_have_broken_the_device(
    make_stack: Callable[..., nn.ModuleList], said: str, meaning: str
) -> None:
    with pytest.raises(LateDeviceError, match=meaning):
        run(make_stack(3), Broken(lambda: None, 0, RuntimeError(said)), 4)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        ValueError(ILLEGAL),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_stay_what_they_are(
    make_stack: Callable[..., nn.ModuleList], error: Exception
) -> None:
    with pytest.raises(type(error)) as raised:
        run(make_stack(3), Broken(lambda: None, 0, error), 4)
    assert raised.value is error


def test_the_first_place_is_named_if_the_end_of_the_run_fails_too(
    make_stack: Callable[..., nn.ModuleList], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError(ILLEGAL)
    monkeypatch.setattr(CpuBackend, "end_run", Broken(lambda: None, 0, error))
    with pytest.raises(LateDeviceError, match="surfaced at block 1 of 'high', step 1"):
        run(make_stack(3), Broken(lambda: None, 0, error), 4)


class Event(float):
    """Event that allows weak references."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_visit_frees_its_events_before_the_exception_goes_on(
    make_stack: Callable[..., nn.ModuleList], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Python frees a context itself during the exception. A CUDA event does not survive this."""
    made: list[weakref.ref[Event]] = []
    stack = make_stack(1)
    with attach_offload(
        stack, policy=OffloadPolicy.layerwise(0), device="cpu", follow_forward=False
    ) as handle:
        with suppress(KeyError), handle.run(step_visits(["blocks"], handle.block_counts)) as run:

            def mark() -> Event:
                event = Event()
                made.append(weakref.ref(event))
                return event

            monkeypatch.setattr(run._clock, "mark", mark)
            context = run.visit(0, "blocks", 0)
            with suppress(KeyError), context:
                begun = list(made)
                assert all(event() is not None for event in begun)
                if fails:
                    raise KeyError
            assert [event() for event in begun] == [None] * len(begun), (
                "the context and the run still exist"
            )
            if fails:
                raise KeyError
