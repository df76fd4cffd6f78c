"""RAM program reads: several blocks in flight, and a run's end after a failed block."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wanstream.offload.host_memory.ram_run import RamRun
from wanstream.offload.host_memory.ram_slots import RamSlots, blocks_in_flight
from wanstream.offload.sources.base import ReadThreads, SourceError
from wanstream.offload.sources.module import TensorSource
from wanstream.plan.programs import BlockKey, compile_program, compile_ram, plan_ram, step_visits
from wanstream.schema import Residency
from wanstream.tests.support.offload.streaming import BLOCKS, CPU, IN_RAM

NBYTES = 4096


def nothing(block: int) -> None: ...


class Gated(TensorSource):
    """Source and page-lock driver with reads and locks given by the test."""

    def __init__(self, read=nothing, lock=nothing) -> None:
        values = [torch.full((NBYTES,), number + 1).byte() for number in range(BLOCKS)]
        super().__init__({BlockKey("high", at): {"w": each} for at, each in enumerate(values)})
        self.started = [threading.Event() for _ in range(BLOCKS)]
        self._read = read
        self._lock = lock

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self.started[key.block].set()
        self._read(key.block)
        super().read_block(key, into)

    def lock_pages(self, memory: torch.Tensor) -> None:
        self._lock(int(memory[0]) - 1)

    def unlock_pages(self, memory: torch.Tensor) -> None: ...


@pytest.fixture
def start():
    """Start a run with one step. It is ended after the test."""
    runs: list[RamRun] = []

    def start(source: Gated, policy) -> RamRun:
        counts = {"high": BLOCKS}
        empty = Residency(residents={})
        residents = plan_ram(policy, empty, counts)
        device = compile_program(step_visits(["high"], counts), empty, 2)
        slots = RamSlots(dict.fromkeys(source.formats, NBYTES), lock=source)
        slots.resize(residents, 2)
        ram = compile_ram(device, residents, staging=2)
        runs.append(RamRun(slots, ram, source, None, device=CPU))
        runs[-1].start()
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
        run.join()


def take(run: RamRun, fetch: int) -> int:
    """Take a block as in a fetch, and return the first byte."""
    value = int(run.take(fetch).memory[0])
    run.leave(fetch)
    return value


def test_a_block_is_read_while_the_one_before_it_is_locked(start):
    """Each lock ends only when the next block's read has begun."""
    begun: list[bool] = []

    def lock(block: int) -> None:
        begun.append(source.started[(block + 1) % BLOCKS].wait(20))

    source = Gated(lock=lock)
    run = start(source, IN_RAM)
    assert [take(run, fetch) for fetch in range(BLOCKS)] == [1, 2, 3, 4, 5, 6]
    assert run.is_whole
    assert [fetch.block.block for fetch in run.reads] == list(range(BLOCKS))
    spans = [run.read_for(fetch) for fetch in range(BLOCKS)]
    assert all(span is not None and span.locked is not None for span in spans)
    assert begun == [True] * BLOCKS


def test_blocks_before_one_that_fails_arrive_later(start):
    def read(block: int) -> None:
        if block == 3:
            raise SourceError("the disk went away")
        source.started[3].wait(20)
        time.sleep(0.01)

    source = Gated(read)
    run = start(source, IN_RAM)
    assert [take(run, fetch) for fetch in range(3)] == [1, 2, 3]
    with pytest.raises(SourceError, match="went away"):
        take(run, 3)
    assert not run.is_whole


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_a_stop_waits_for_the_piece_or_the_block(start, whole_blocks):
    begun = threading.Event()
    gate = threading.Event()
    read = []
    threads = ReadThreads(1, ThreadPoolExecutor)

    def read_piece() -> None:
        begun.set()
        assert gate.wait(20)
        read.append(True)

    run = start(Gated(lambda block: threads.run([read_piece] * 3)), IN_RAM)
    assert begun.wait(20)
    run.stop(whole_blocks=whole_blocks)
    gate.set()
    run.join()
    threads.close()
    assert len(read) == (3 * len(run.reads) if whole_blocks else 1)
    assert bool(run.reads) == whole_blocks


def test_more_blocks_are_in_flight_if_they_are_small():
    sizes = (0, 1_000_000, 64 * 2**20, 351_000_000, 703_000_000)
    assert [blocks_in_flight(nbytes) for nbytes in sizes] == [8, 8, 5, 2, 2]
