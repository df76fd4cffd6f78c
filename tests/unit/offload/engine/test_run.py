"""Runs cut short: late device errors with their place, and blocks kept for the next run."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from wanstream.devices import LateDeviceError, is_broken_device
from wanstream.offload import BlockPatch, WeightPatch
from wanstream.offload.core.buffers import BlockBuffer
from wanstream.offload.transfers.cpu import CpuBackend
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.marks import needs_device_errors
from wanstream.tests.support.offload.streaming import BLOCKS, CPU, ONES, WIDTH, attach, keys, stream
from wanstream.tests.support.polling import eventually

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Broken:
    """Callable that raises an error after `at` calls."""

    def __init__(self, error: Exception, at: int, call: Callable[..., object]) -> None:
        self.error = error
        self.left = at
        self.call = call

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.call(*args, **kwargs)


def run_broken(make_stack, error: Exception | None, at: int | None) -> None:
    """Stream two passes of three blocks with an error in a visit, or after it for `-at`."""
    with attach({"high": make_stack(3)}) as engine:
        with engine.run(step_visits(["high"] * 2, engine.block_counts)) as run:
            for number, visit in enumerate(run.program.visits):
                with run.visit(*visit):
                    if number == at:
                        raise error
                if at is not None and number == -at:
                    raise error


@needs_device_errors
@pytest.mark.parametrize(
    ("at", "call", "place"),
    [
        (4, None, "block 1 of 'high', step 1"),
        # After visit 2.
        (-2, None, "the end of block 2 of 'high', step 0"),
        (None, (CpuBackend, "copy_in", 4), "the fetch of block 1 of 'high', step 1"),
        (None, (BlockBuffer, "release", 2), "block 2 of 'high', step 0"),
        (None, (BlockBuffer, "acquire", 3), "block 0 of 'high', step 1"),
        (None, (CpuBackend, "begin_run", 0), "the start of a run"),
        (None, (CpuBackend, "end_run", 0), "the end of block 2 of 'high', step 1"),
        (4, (CpuBackend, "end_run", 0), "block 1 of 'high', step 1"),
    ],
    ids=str,
)
def test_late_errors_name_the_place(make_stack, monkeypatch, at, call, place):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", str(int(at == -2)))
    error = torch.AcceleratorError(f"{ILLEGAL}\nCUDA kernel errors might be asynchronous")
    if call is not None:
        owner, name, number = call
        broken = Broken(error, number, getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: broken(*args, **kwargs))
    surfaced = "at {}" if at == -2 else "surfaced at {}: start again with CUDA_LAUNCH"
    words = re.escape(f"{ILLEGAL}, {surfaced.format(place)}")
    with pytest.raises(LateDeviceError, match=words) as raised:
        run_broken(make_stack, error, at)
    assert raised.value.__cause__ is error
    assert is_broken_device(raised.value)


@needs_device_errors
@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (ILLEGAL, "usable by a new process only"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`", "short of mem"),
    ],
)
def test_library_errors_may_leave_the_device_whole(make_stack, words, meaning):
    with pytest.raises(LateDeviceError, match=meaning):
        run_broken(make_stack, RuntimeError(words), 4)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory")]
ERRORS += [RuntimeError("CUDA error: out of memory"), ValueError(ILLEGAL)]


@needs_device_errors
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_other_errors_stay_as_they_are(make_stack, error):
    with pytest.raises(type(error)) as raised:
        run_broken(make_stack, error, 4)
    assert raised.value is error


class Event(float):
    """Event that allows weak references."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_visit_frees_its_events_before_the_error_goes_on(make_stack, monkeypatch, fails):
    """Python frees a context itself during the exception. A CUDA event does not survive this."""
    made: list[weakref.ref[Event]] = []

    def mark() -> Event:
        made.append(weakref.ref(event := Event()))
        return event

    with attach({"blocks": make_stack(1)}, OffloadPolicy.layerwise(0)) as engine:
        with suppress(KeyError), engine.run(step_visits(["blocks"], engine.block_counts)) as run:
            monkeypatch.setattr(run._clock, "mark", mark)
            context = run.visit(0, "blocks", 0)
            with suppress(KeyError), context:
                begun = list(made)
                assert all(event() is not None for event in begun)
                if fails:
                    raise KeyError
            assert not any(event() for event in begun), "the context and the run still exist"
            if fails:
                raise KeyError


left_early = pytest.mark.parametrize(("blocks", "patched"), [(0, True), (1, False), (2, True)])


def check_left_early(stacks, device: torch.device, blocks: int, patched: bool) -> None:
    """Leave a run after some blocks, and count what the next run fetches."""
    recorder = Recorder(device)
    value = ONES.to(device)
    ahead = blocks + 3  # as many as there are buffers
    with attach(stacks, OffloadPolicy.layerwise(2), device=device) as engine:
        if patched:  # a CPU's compute thread adds patches before a block is complete
            weight = WeightPatch(up=torch.full((3 * WIDTH, 2), 0.1), down=torch.ones(2, WIDTH))
            patch = BlockPatch(identity=1, weights={"up.weight": weight})
            engine.set_patches(dict.fromkeys(keys("high", *range(BLOCKS)), patch))
        expected, run = stream(engine, stacks, ["high"], value)
        assert len(run.fetched) == BLOCKS
        engine.release_memory(engine.loaded_bytes)
        with recorder.step(0, "high"):
            with engine.run(step_visits(["high"] * 2, engine.block_counts), recorder) as run:
                for block in range(blocks):
                    with run.visit(0, "high", block):
                        stacks["high"][block](value)
                assert eventually(lambda: len(run.fetched) >= ahead), "fetches were not issued"
                run.leave()
            recorder.cached(lanes=1, visits=BLOCKS - blocks)
        assert (recorder.last.skipped_lanes, recorder.last.skipped_visits) == (1, BLOCKS - blocks)
        key = BlockKey("high", 0)
        block_bytes = engine.route.sizes[key] + engine.patches.nbytes(key)
        assert recorder.last.bytes_moved == ahead * block_bytes
        held = keys("high", *range(blocks, ahead))
        assert set(engine.contents().values()) == held
        again, run = stream(engine, stacks, ["high"], value)
        assert torch.equal(again, expected)
        assert len(run.fetched) == BLOCKS - sum(key.block < 3 for key in held)


@left_early
def test_a_run_left_early_keeps_its_fetches(stacks, blocks, patched):
    check_left_early(stacks, CPU, blocks, patched)


@left_early
def test_a_run_left_early_keeps_its_fetches_on_a_device(gpu, stacks, blocks, patched):
    check_left_early(stacks, gpu.device, blocks, patched)


def test_a_failed_run_keeps_nothing_and_is_left_before_its_end(stacks):
    with attach(stacks) as engine:
        run = engine.run(step_visits(["high"], engine.block_counts))
        with pytest.raises(KeyError), run:
            run.leave()
            raise KeyError
        assert engine.contents() == {}
        with pytest.raises(AssertionError, match="before the run has ended"):
            run.leave()
