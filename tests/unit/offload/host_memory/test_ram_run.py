"""RAM program reads: several blocks in flight, and a run's end after a failed block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wanstream.offload.formats.layout import block_format
from wanstream.offload.host_memory.ram_run import RamRun
from wanstream.offload.host_memory.ram_slots import RamSlots, blocks_in_flight
from wanstream.offload.sources.base import ReadThreads, SourceError
from wanstream.plan.programs import BlockKey, compile_program, compile_ram, plan_ram, step_visits
from wanstream.schema import OffloadPolicy, Residency

BLOCKS, NBYTES = 6, 4096
CPU = torch.device("cpu")
IN_RAM, STAGED = OffloadPolicy.layerwise(1, source="pinned"), OffloadPolicy.layerwise(1)


class Gated:
    """Source and page-lock driver with reads and locks given by the test."""

    def __init__(self, read: Callable[[int], object], lock: Callable[[int], object]) -> None:
        self.formats = {
            BlockKey("high", n): block_format({"w": ((NBYTES,), torch.uint8)}, torch.uint8)
            for n in range(BLOCKS)
        }
        self.started = [threading.Event() for _ in range(BLOCKS)]
        self._read, self._lock = read, lock

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return {}

    def file_bytes(self, key: BlockKey) -> int:
        return NBYTES

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self.started[key.block].set()
        self._read(key.block)
        into.fill_(key.block + 1)

    def lock_pages(self, memory: torch.Tensor) -> None:
        self._lock(int(memory[0]) - 1)

    def unlock_pages(self, memory: torch.Tensor) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def start():
    """Start a run with one step. It is ended after the test."""
    runs: list[RamRun] = []

    def start(source: Gated, policy: OffloadPolicy) -> RamRun:
        counts, nothing = {"high": BLOCKS}, Residency(residents={})
        residents = plan_ram(policy, nothing, counts)
        device = compile_program(step_visits(["high"], counts), nothing, 2)
        slots = RamSlots(dict.fromkeys(source.formats, NBYTES), lock=source)
        slots.resize(residents, 2)
        runs.append(
            RamRun(slots, compile_ram(device, residents, staging=2), source, None, device=CPU)
        )
        runs[-1].start()
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
        run.join()


def take(run: RamRun, fetch: int) -> int:
    """Take a block as in a fetch, and return the first byte."""
    slot = run.take(fetch)
    assert slot is not None
    assert slot.memory is not None
    value = int(slot.memory[0])
    run.leave(fetch)
    return value


def test_a_block_is_read_while_the_one_before_it_is_locked(start):
    """Each lock ends only when the next block's read has begun."""
    begun: list[bool] = []
    source = Gated(
        lambda block: None,
        lambda block: begun.append(source.started[(block + 1) % BLOCKS].wait(20)),
    )
    run = start(source, IN_RAM)
    assert [take(run, fetch) for fetch in range(BLOCKS)] == [1, 2, 3, 4, 5, 6]
    assert run.is_whole
    assert [fetch.block.block for fetch in run.reads] == list(range(BLOCKS))
    spans = [run.read_for(fetch) for fetch in range(BLOCKS)]
    assert all(span is not None and span.locked is not None for span in spans)
    assert begun == [True] * BLOCKS


@pytest.mark.parametrize("policy", [IN_RAM, STAGED], ids=["in RAM", "staged"])
@pytest.mark.parametrize("failing", range(BLOCKS))
def test_blocks_before_one_that_fails_arrive_even_if_they_are_slower(start, policy, failing):
    def read(block: int) -> None:
        if block == failing:
            raise SourceError("the disk went away")
        time.sleep(0.002)

    run = start(Gated(read, lambda block: None), policy)
    assert [take(run, fetch) for fetch in range(failing)] == list(range(1, failing + 1))
    with pytest.raises(SourceError, match="the disk went away"):
        take(run, failing)
    assert not run.is_whole


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("policy", [IN_RAM, STAGED], ids=["in RAM", "staged"])
def test_a_run_that_stops_waits_for_the_piece_or_the_block_in_progress(start, policy, whole_blocks):
    begun, gate, read = threading.Event(), threading.Event(), []
    threads = ReadThreads(1, ThreadPoolExecutor)

    def read_piece() -> None:
        begun.set()
        assert gate.wait(20)
        read.append(True)

    run = start(Gated(lambda block: threads.run([read_piece] * 3), lambda block: None), policy)
    assert begun.wait(20)
    run.stop(whole_blocks=whole_blocks)
    gate.set()
    run.join()
    threads.close()
    assert len(read) == (3 * len(run.reads) if whole_blocks else 1)
    assert bool(run.reads) == whole_blocks


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [(0, 8), (1_000_000, 8), (64 * 2**20, 5), (351_000_000, 2), (703_000_000, 2)],
)
def test_small_blocks_fly_in_greater_numbers(block_bytes, blocks):
    assert blocks_in_flight(block_bytes) == blocks
