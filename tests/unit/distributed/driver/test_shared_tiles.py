"""Tile size by worker memory, and smaller tiles after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.distributed.driver.decode import decode_in_shared_tiles, tiles_by_memory
from wanstream.distributed.driver.stage_run import RestartLimitError
from wanstream.distributed.messages import DecodeTask, WorkerFacts
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.worker import Worker, decode_budget
from wanstream.schema.refs import WorkersRef
from wanstream.wan.vae.memory import DecodeNeeds, VaeMemoryError
from wanstream.wan.vae.tiles import Tiling, TilingError
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, open_vae

LATENTS = 3 * torch.randn(1, 16, 1, 11, 12, generator=torch.Generator().manual_seed(0))
FIRST = Tiling.of(88)
GB = 10**9
NEEDS = DecodeNeeds(
    height=60, width=104, frames=81, pixel_bytes=1_463_000, value_bytes=4, keeps_frames=True
)


@pytest.fixture(scope="module")
def vae(tiny_pipeline: Callable[[], Path]) -> Path:
    return tiny_pipeline()


@pytest.fixture(scope="module")
def needs(vae: Path) -> DecodeNeeds:
    with open_vae(vae) as opened:
        return opened.decode_needs(LATENTS)


@pytest.fixture
def decode(vae, needs):
    """`decode(pool, **changes)` decodes `LATENTS` with `FIRST` as tiling."""

    def run(pool: Any, **changes: Any) -> torch.Tensor:
        ref = WorkersRef(count=len(pool.workers), max_restarts=0, timeout_s=60.0)
        task = DecodeTask(latents=LATENTS, vae=vae)
        return decode_in_shared_tiles(pool, ref, task, FIRST, needs, **changes)

    return run


def no_room_above(size: int) -> Callable[[Any, DecodeTask], None]:
    """Return a callback to fail the first worker's tiles wider than `size` latents."""

    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 0 and task.latents.shape[4] > size:
            raise torch.OutOfMemoryError("no room for a tile")

    return before


@pytest.mark.slow  # several workers decode or compute
def test_memory_that_runs_out_on_a_worker_leads_to_smaller_tiles(tile_pools, decode, vae):
    told: list[str] = []
    done: list[tuple[int, int]] = []
    workers = tile_pools(2, no_room_above(8))
    made = decode(workers, on_change=told.append, on_tile=lambda *tiles: done.append(tiles))
    with open_vae(vae) as alone:
        assert torch.equal(made, alone.decode(LATENTS, device="cpu", tiling=Tiling.of(64)))
    assert told == ["no memory for decoding tiles of 88 pixels: retrying with tiles of 64 pixels"]
    tiles = len(Tiling.of(64).tiles(11, 12))
    assert done[-tiles:] == [(number, tiles) for number in range(1, tiles + 1)]
    # Nothing of a try is left for the next one.
    assert [worker.freed for worker in workers.workers] == [2, 2]
    assert not any(worker.killed for worker in workers.workers)


def test_no_memory_for_the_smallest_tile(tile_pools, decode):
    workers = tile_pools(2, no_room_above(3))
    said = "tiles of 64 pixels, the smallest size: no room for a tile"
    with pytest.raises(DecodeOutOfMemoryError, match=said):
        decode(workers)


def test_a_lost_worker_is_no_shortage_whatever_its_log_says(tile_pools, decode):
    def before(worker: Any, task: DecodeTask) -> None:
        raise WorkerLostError("gone; its log: can't allocate memory", worker.rank)

    told: list[str] = []
    with pytest.raises(RestartLimitError, match="gone"):
        decode(tile_pools(2, before), on_change=told.append)
    assert told == []


UNKNOWN = RuntimeError("no figures")
Told = WorkerFacts | Exception | None
"""Facts of a worker, its error, or silence."""


class Telling:
    """Pool whose workers return facts, raise or are silent. Replacements return `later`."""

    def __init__(self, *told: Told, later: Told = None) -> None:
        self.workers = [_Telling(each) for each in told]
        self._later = later

    def replace(self, rank: int) -> None:
        assert self._later is not None, "no worker is lost"
        self.workers[rank] = _Telling(self._later)


class _Telling:
    def __init__(self, told: Told) -> None:
        self._told = told

    def call(self, method: str) -> Future[WorkerFacts]:
        assert method == "facts"
        answer: Future[WorkerFacts] = Future()
        if isinstance(self._told, Exception):
            answer.set_exception(self._told)
        elif self._told is not None:
            answer.set_result(self._told)
        return answer


def gpu(tile_bytes: int) -> WorkerFacts:
    return replace(Worker("cpu").facts(), device="cuda:0", tile_bytes=tile_bytes)


def tiles(*told: Told, later: Told = None, **changes: Any) -> Tiling:
    given = {"weight_bytes": GB, "memory_bytes": 0, "videos": 1, **changes}
    return tiles_by_memory(Telling(*told, later=later), NEEDS, **given)


def test_lost_workers_are_replaced_before_planning():
    lost = WorkerLostError("gone", 1)
    assert tiles(gpu(80 * GB), lost, later=gpu(2 * GB)) == tiles(gpu(80 * GB), gpu(2 * GB))
    # It is replaced once only.
    assert tiles(gpu(2 * GB), lost, later=lost) == tiles(gpu(2 * GB), UNKNOWN)


def test_the_worker_that_has_least_decides():
    small = tiles(gpu(80 * GB), gpu(2 * GB))
    assert small == tiles(gpu(2 * GB), gpu(2 * GB))
    assert NEEDS.device_bytes(small) <= GB < NEEDS.device_bytes(Tiling.of(320))
    assert tiles(gpu(80 * GB), gpu(80 * GB)).pixels > small.pixels
    # A budget of the user has no effect beyond the free memory.
    assert tiles(gpu(80 * GB), gpu(80 * GB), memory_bytes=GB) == small
    assert tiles(gpu(2 * GB), gpu(2 * GB), memory_bytes=50 * GB) == small


def test_workers_on_cpus_share_the_ram_of_their_machine():
    room = NEEDS.device_bytes(None)
    here = replace(gpu(room), device="cpu", machine="here")
    alone, two = tiles(here, weight_bytes=0), tiles(here, here, weight_bytes=0)
    assert NEEDS.fit(alone, room, shared=True), "frames lie in the same memory"
    assert NEEDS.fit(two, room // 2, shared=True)
    assert two.pixels < alone.pixels
    # Machines that were cloned may share a host name. One that reports no memory is not counted.
    there = replace(here, machine="there")
    assert there.node == here.node
    assert tiles(here, there, weight_bytes=0) == tiles(here, UNKNOWN, weight_bytes=0)


def test_too_little_memory_and_none_that_is_known_are_refused():
    with pytest.raises(VaeMemoryError, match=r"0\.00 GB given"):
        tiles(gpu(GB // 2), gpu(80 * GB))
    with pytest.raises(TilingError, match=r"no worker reported .* within 30 s: set tile_size"):
        tiles(UNKNOWN)


def test_a_cancel_ends_the_asking():
    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiles(None, check=cancel)


def test_a_worker_reports_memory_for_tiles():
    assert Worker("cpu").facts().tile_bytes > 0
    # RAM held by experts is not counted twice.
    assert decode_budget(torch.device("cpu"), 10**15) < 10**15


def test_what_experts_hold_counts_as_room_on_a_gpu(gpu):
    more = decode_budget(gpu.device, GB) - decode_budget(gpu.device, 0)
    assert more == pytest.approx(GB, abs=50_000_000)
