"""Runs of an engine: bit-equal at any timing, exclusive, and whole again after errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from wanstream.devices.clock import CpuClock
from wanstream.offload.sources.base import ReadThreads
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.cpu import CpuBackend
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.schema import OffloadPolicy, StateError
from wanstream.telemetry import Recorder
from wanstream.tests.support.offload.fixtures import GatedSource
from wanstream.tests.support.offload.streaming import CPU, IN_RAM, attach, plainly, stream


class Moment(float):
    """CPU event. `alive` counts existing events."""

    alive = 0

    def __init__(self, _: float) -> None:
        type(self).alive += 1

    def __del__(self) -> None:
        type(self).alive -= 1


class CountedClock(CpuClock):
    mark = staticmethod(lambda: Moment(time.perf_counter()))


def test_a_long_run_holds_few_marks(stacks):
    """On a GPU each mark is a CUDA event, and a run may have 400,000 visits."""
    alive = []
    recorder = Recorder(CPU)
    recorder.clock = CountedClock()
    with attach(stacks, OffloadPolicy.block_swap(2, 1)) as engine:
        how = {"during": lambda visit: alive.append(Moment.alive), "recorder": recorder}
        stream(engine, stacks, ["high"] * 20, **how)
    assert 0 < max(alive) < 50, "those of the last visits, of 120"


def test_visits_need_an_active_run_and_their_order(stacks):
    with attach(stacks) as engine:
        run = engine.run(step_visits(["high"], engine.block_counts))
        with pytest.raises(StateError, match="not active"), run.visit(0, "high", 0):
            pass
        with run:
            with run.visit(0, "high", 0):
                pass
            with pytest.raises(StateError, match="visit 1"), run.visit(0, "high", 2):
                pass
        with pytest.raises(StateError, match="not active"), run.visit(0, "high", 1):
            pass


def test_a_program_with_exchanged_fetches_is_refused(stacks, monkeypatch):
    with attach(stacks) as engine:
        visits = step_visits(["high", "high"], engine.block_counts)
        programs = engine.programs(visits)
        first, second, *rest = programs.device.fetches
        fetches = (first._replace(buffer=second.buffer), second, *rest)
        broken = replace(programs, device=replace(programs.device, fetches=fetches))
        monkeypatch.setattr(engine, "programs", lambda _: broken)
        with pytest.raises(ProgramError):
            engine.run(visits)


def test_a_running_engine_refuses_changes(stacks):
    expected = plainly(stacks)
    engine = attach(stacks)
    changes = {
        "run": lambda: engine.run(step_visits(["high"], engine.block_counts)),
        "policy": lambda: engine.set_policy(OffloadPolicy.layerwise(2)),
        "patches": lambda: engine.set_patches({}),
        "release": lambda: engine.release_memory(1),
        "allocate": engine.allocate_buffers,
        "detach": engine.detach,
    }

    def refused(visit: int) -> None:
        for change in changes.values():
            with pytest.raises(RuntimeError, match="running"):
                change()

    assert torch.equal(stream(engine, stacks, during=refused)[0], expected)
    engine.detach()
    for name in ("policy", "patches"):
        with pytest.raises(RuntimeError, match="detached"):
            changes[name]()
    assert torch.equal(plainly(stacks), expected)


@pytest.mark.parametrize("source", ["pinned", "file"])
def test_a_poll_ends_a_waiting_visit_and_its_read(stacks, monkeypatch, source):
    class Cancelled(Exception): ...

    expected = plainly(stacks)
    gate = threading.Event()
    begun = []
    read = []
    threads = ReadThreads(1, ThreadPoolExecutor)
    whole = ModuleSource.read_range

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
    with attach(stacks, OffloadPolicy.layerwise(1, source=source)) as engine:
        visits = step_visits(["high"], engine.block_counts)
        with pytest.raises(Cancelled), engine.run(visits) as run:
            with run.visit(0, "high", 0, poll=poll):
                pytest.fail("the block is not read")
        assert len(begun) == len(read) <= 1
        assert torch.equal(stream(engine, stacks)[0], expected)
    threads.close()


@pytest.mark.parametrize("error", [RuntimeError("it has failed"), KeyboardInterrupt()], ids=type)
def test_detach_after_a_device_error_or_an_interrupt(stacks, monkeypatch, error):
    block = stacks["high"][0]
    source = ModuleSource(stacks)
    weight = block.up.weight
    engine = attach(stacks, source=source)

    def fail(backend: CpuBackend) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(CpuBackend, "settle", fail)
        engine.detach()
    # After an interrupt, copies may be under way.
    assert (block.up.weight is weight) == isinstance(error, RuntimeError)
    engine.detach()
    assert block.up.weight is weight
    assert engine.loaded_bytes == engine.host_bytes == 0
    with pytest.raises(KeyError):
        source.weights(BlockKey("high", 0))


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to one thread")
def test_a_second_interrupt_leaves_no_fetch_thread(stacks, monkeypatch):
    source = GatedSource(stacks)
    ended = []

    def interrupt_again() -> None:
        # Long enough for the first interrupt to reach the run's end. Less time would prove less.
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        source.opened.set()

    with attach(stacks, source=source) as engine:
        end_run = engine.backend.end_run
        monkeypatch.setattr(engine.backend, "end_run", lambda: ended.append(end_run()))
        again = threading.Thread(target=interrupt_again)
        try:
            with pytest.raises(KeyboardInterrupt):
                with engine.run(step_visits(["high"], engine.block_counts)):
                    assert source.entered.wait(60)
                    again.start()
                    raise KeyboardInterrupt
            names = [thread.name for thread in threading.enumerate()]
            assert not [name for name in names if name.startswith("wanstream-fetch")]
            assert len(ended) == 1, "later work must still wait for the visits of this run"
        finally:
            source.opened.set()
            again.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_is_refused_memory_that_it_lacks(stacks):
    expected = plainly(stacks)
    with attach(stacks, IN_RAM) as engine:
        stream(engine, stacks)
        if (child := os.fork()) == 0:
            refused = False
            try:
                engine.run(step_visits(["high"], engine.block_counts))
            except RuntimeError as err:
                refused = "this is a fork" in str(err)
            finally:
                os._exit(3 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert torch.equal(stream(engine, stacks)[0], expected)


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
def test_an_open_forward_does_not_keep_the_process_alive():
    command = [sys.executable, "-c", LEFT_OPEN]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
