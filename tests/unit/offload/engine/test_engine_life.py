"""An engine between runs: exclusive starts, failed starts, interrupts and detaching."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from wanstream.offload import OffloadEngine, attach_offload
from wanstream.offload.sources.base import ReadThreads
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.cpu import CpuBackend
from wanstream.plan.programs import BlockKey, Visit, step_visits
from wanstream.schema import OffloadPolicy, StateError

CPU = torch.device("cpu")


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(4)


def attach(stack: nn.ModuleList, **how: object) -> OffloadEngine:
    settings = {"policy": OffloadPolicy.layerwise(1), "follow_forward": False, **how}
    return attach_offload({"high": stack}, device=CPU, **settings)


def visits_of(handle: OffloadEngine) -> tuple[Visit, ...]:
    return step_visits(["high"], handle.block_counts)


def take_all(handle: OffloadEngine, stack: nn.ModuleList, value: torch.Tensor) -> torch.Tensor:
    with handle.run(visits_of(handle)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                value = stack[visit.block](value)
    return value


def fetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wanstream-fetch")]


@pytest.mark.parametrize("source", ["pinned", "file"])
def test_a_visit_that_waits_for_its_block_ends_by_a_poll_and_the_read_with_it(
    stack, monkeypatch, run_plain, source
):
    class Cancelled(Exception): ...

    expected, gate, begun, read = (
        run_plain(copy.deepcopy(stack), torch.ones(1, 32)),
        threading.Event(),
        [],
        [],
    )
    threads, whole = ReadThreads(1, ThreadPoolExecutor), ModuleSource.read_range

    def in_pieces(self: ModuleSource, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        def piece() -> None:
            begun.append(key)
            assert gate.wait(20)
            whole(self, key, wanted, into)
            read.append(key)

        threads.run([piece, piece, piece])

    def poll(visit: object) -> None:
        gate.set()
        raise Cancelled

    monkeypatch.setattr(ModuleSource, "read_range", in_pieces)
    monkeypatch.setattr("wanstream.offload.core.threads.CANCEL_POLL_S", 0.01)
    with attach(stack, policy=OffloadPolicy.layerwise(1, source=source)) as handle:
        with (
            pytest.raises(Cancelled),
            handle.run(visits_of(handle)) as run,
            run.visit(0, "high", 0, poll=poll),
        ):
            pytest.fail("the block is not read")
        assert len(begun) == len(read) <= 1
        assert torch.equal(take_all(handle, stack, torch.ones(1, 32)), expected)
    threads.close()


@pytest.mark.parametrize(
    "error", [RuntimeError("the device has failed"), KeyboardInterrupt()], ids=type
)
def test_a_detach_is_whole_if_the_device_has_failed_and_can_be_repeated_after_an_interrupt(
    stack, monkeypatch, error
):
    weight, source = stack[0].up.weight, ModuleSource({"high": stack})
    handle = attach(stack, source=source)

    def fail(backend: CpuBackend) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(CpuBackend, "settle", fail)
        handle.detach()
    # After an interrupt, copies may be under way.
    assert (stack[0].up.weight is weight) == isinstance(error, RuntimeError)
    handle.detach()
    assert stack[0].up.weight is weight
    assert handle.loaded_bytes == handle.host_bytes == 0
    with pytest.raises(KeyError):
        source.weights(BlockKey("high", 0))


def test_of_two_runs_made_before_either_began_one_is_refused(stack, run_plain):
    expected = run_plain(copy.deepcopy(stack), torch.ones(1, 32))
    with attach(stack) as handle:
        first, second = handle.run(visits_of(handle)), handle.run(visits_of(handle))
        value = torch.ones(1, 32)
        with first:
            with pytest.raises(RuntimeError, match="already running"), second:
                pass
            for visit in first.program.visits:
                with first.visit(*visit):
                    value = stack[visit.block](value)
        assert torch.equal(value, expected)


def test_a_run_that_cannot_begin_leaves_the_engine_usable(stack, run_plain):
    expected = run_plain(copy.deepcopy(stack), torch.ones(1, 32))
    with attach(stack, policy=OffloadPolicy.resident()) as handle:
        take_all(handle, stack, torch.ones(1, 32))
        stale = handle.run(visits_of(handle))
        handle.buffers[0].key = BlockKey("high", 3)
        with pytest.raises(StateError), stale:
            pass
        handle.buffers[0].key = BlockKey("high", 0)
        assert torch.equal(take_all(handle, stack, torch.ones(1, 32)), expected)
    assert fetch_threads() == []


def test_a_visit_needs_a_run_that_is_going_on(stack):
    with attach(stack) as handle:
        run = handle.run(visits_of(handle))
        with pytest.raises(StateError, match="not active"), run.visit(0, "high", 0):
            pass
        with run, run.visit(0, "high", 0):
            pass
        with pytest.raises(StateError, match="not active"), run.visit(0, "high", 1):
            pass


def test_a_running_engine_is_not_taken_away(stack, run_plain):
    expected = run_plain(copy.deepcopy(stack), torch.ones(1, 32))
    handle = attach(stack)
    value = torch.ones(1, 32)
    with handle.run(visits_of(handle)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                with pytest.raises(RuntimeError, match="running"):
                    handle.detach()
                value = stack[visit.block](value)
    assert torch.equal(value, expected)
    handle.detach()
    assert torch.equal(run_plain(stack, torch.ones(1, 32)), expected)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to one thread")
def test_a_second_interrupt_does_not_leave_the_fetch_thread_behind(stack):
    class Gate(ModuleSource):
        def __init__(self) -> None:
            super().__init__({"high": stack})
            self.open = threading.Event()
            self.entered = threading.Event()

        def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
            self.entered.set()
            assert self.open.wait(60)
            super().read_block(key, into)

    gate = Gate()

    def interrupt_again() -> None:
        # Long enough for the first interrupt to reach the run's end. Less time would prove less.
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        gate.open.set()

    class CountingBackend:
        def __init__(self, inner: CpuBackend) -> None:
            self.inner, self.ended = inner, 0

        def end_run(self) -> None:
            self.ended += 1
            self.inner.end_run()

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    with attach(stack, source=gate) as handle:
        handle.backend = counting = CountingBackend(handle.backend)
        again = threading.Thread(target=interrupt_again)
        try:
            with pytest.raises(KeyboardInterrupt), handle.run(visits_of(handle)):
                assert gate.entered.wait(60)
                again.start()
                raise KeyboardInterrupt
            assert fetch_threads() == []
            assert counting.ended == 1, "later work must still wait for the visits of this run"
        finally:
            gate.open.set()
            again.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_never_computes_with_memory_that_it_does_not_inherit(stack, run_plain):
    expected = run_plain(copy.deepcopy(stack), torch.ones(1, 32))
    handle = attach(stack, policy=OffloadPolicy.layerwise(1, source="pinned"))
    take_all(handle, stack, torch.ones(1, 32))
    if (child := os.fork()) == 0:
        refused = False
        try:
            handle.run(visits_of(handle))
        except RuntimeError as err:
            refused = "this is a fork" in str(err)
        finally:
            os._exit(3 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert torch.equal(take_all(handle, stack, torch.ones(1, 32)), expected)
    handle.detach()


LEFT_OPEN = """
import torch
from torch import nn
from wanstream.offload import attach_offload
from wanstream.schema import OffloadPolicy

blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)).requires_grad_(False)
handle = attach_offload(blocks, policy=OffloadPolicy.layerwise(1), device="cpu")
blocks[0](torch.ones(1, 4))
raise SystemExit(7)
"""


@pytest.mark.integration
def test_a_forward_that_never_ends_does_not_keep_the_process_alive():
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
