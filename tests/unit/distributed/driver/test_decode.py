"""Shared decode: bit-equal to one VAE, few tiles at a time, lost and stopped workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.distributed.driver.decode import EARLY_TILES, TileGroup, decode_in_shared_tiles
from wanstream.distributed.driver.stage_run import RestartLimitError
from wanstream.distributed.messages import DecodeCancelled, DecodeTask, RendezvousSpec, RunTask
from wanstream.distributed.path_map import MissingPathError
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.worker import TileDecoder, Worker
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.schema import Mesh
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.tests.support.reports import latents_of
from wanstream.wan.vae.memory import DecodeNeeds
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import VaeInputError, open_vae

TILING = Tiling(pixels=64, stride=48)
NEEDS = DecodeNeeds(height=72, width=112, frames=5, pixel_bytes=1, value_bytes=4, keeps_frames=True)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return 3 * torch.randn(2, 16, 2, 9, 14, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def alone(tiny_pipeline: Callable[[], Path], latents: torch.Tensor) -> torch.Tensor:
    with open_vae(tiny_pipeline()) as vae:
        return vae.decode(latents, device="cpu", tiling=TILING)


@pytest.fixture
def job(tiny_pipeline: Callable[[], Path], latents: torch.Tensor) -> DecodeTask:
    return DecodeTask(latents=latents, vae=tiny_pipeline())


def _decode(
    pool: Any,
    job: DecodeTask,
    *,
    max_restarts: int = 1,
    timeout_s: float = LIMIT_S,
    paths: tuple[PathMap, ...] = (),
    tiling: Tiling = TILING,
    **changes: Any,
) -> torch.Tensor:
    ref = WorkersRef(
        count=len(pool.workers), max_restarts=max_restarts, timeout_s=timeout_s, paths=paths
    )
    return decode_in_shared_tiles(pool, ref, job, tiling, NEEDS, **changes)


def stop_when(condition: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if condition():
            raise DecodeCancelled("stopped by the test")

    return check


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_frames_are_those_of_one_worker(
    count: int, tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    told: list[tuple[int, int]] = []
    workers = tile_pools(count)
    assert torch.equal(_decode(workers, job, on_tile=lambda *tiles: told.append(tiles)), alone)
    tiles = 2 * len(TILING.tiles(9, 14))
    assert told == [(done, tiles) for done in range(1, tiles + 1)]
    assert sum(worker.tiles for worker in workers.workers) == tiles
    assert [worker.freed for worker in workers.workers] == [1] * count


@pytest.mark.slow  # several workers decode or compute
@pytest.mark.parametrize("tiling", [TILING, Tiling.of(128)], ids=["tiles", "whole frames"])
def test_a_worker_gets_the_latents_of_its_tile_only(
    tiling: Tiling, tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    sizes: list[tuple[int, int]] = []

    def before(worker: Any, task: DecodeTask) -> None:
        sizes.append((task.latents.untyped_storage().nbytes(), task.latents.nbytes))
        assert task.latents.is_contiguous()

    _decode(tile_pools(1, before), job, tiling=tiling)
    assert len(sizes) == 2 * len(tiling.tiles(9, 14))
    assert all(stored == used for stored, used in sizes), "a pickled tensor has its whole storage"


@pytest.mark.slow
def test_workers_compute_in_the_dtype_that_is_asked_for(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    workers = tile_pools(2)
    small = replace(job, latents=job.latents[:1, :, :1, :9, :4])
    halves = _decode(workers, replace(small, dtype=torch.bfloat16))
    with open_vae(job.vae, torch.bfloat16) as vae:
        assert torch.equal(halves, vae.decode(small.latents, device="cpu", tiling=TILING))
    assert not torch.equal(halves, _decode(workers, small))
    assert torch.equal(_decode(workers, job), alone), "the same workers, in fp32 again"


@pytest.mark.slow  # several workers decode or compute
def test_a_slow_tile_holds_the_others_up_before_they_fill_the_memory(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    ahead, go_on = threading.Event(), threading.Event()
    done: list[int] = []
    early: list[int] = []

    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 0 and not ahead.is_set():
            ahead.set()
            assert go_on.wait(LIMIT_S), "nobody stopped to hand out tiles"

    def looked() -> None:
        # The driver polls again and leaves an idle worker idle: it has submitted all tiles it may.
        worker = workers.workers[1]
        done.append(worker.tiles if worker.tiles == worker.given else -1)
        if (
            ahead.is_set()
            and len(done) > 3
            and done[-1] == done[-2] == done[-3] >= 0
            and not go_on.is_set()
        ):
            early.append(done[-1])
            go_on.set()

    workers = tile_pools(2, before)
    frames = _decode(workers, job, check=looked)
    assert torch.equal(frames, alone)
    columns = max(tile.column for tile in TILING.tiles(9, 14)) + 1
    assert early == [columns + EARLY_TILES * 2]


def test_a_lost_worker_is_replaced_and_its_tile_made_again(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 1 and worker.tiles == 1:
            raise WorkerLostError("gone", 1)

    workers = tile_pools(2, before)
    assert torch.equal(_decode(workers, job), alone)
    assert len(workers.all) == 3


def test_the_last_restart_is_the_last(tile_pools: Callable[..., Any], job: DecodeTask) -> None:
    def before(worker: Any, task: DecodeTask) -> None:
        raise WorkerLostError("gone for good", worker.rank)

    with pytest.raises(RestartLimitError, match="gone for good\ngiving up after 0 worker restarts"):
        _decode(tile_pools(2, before), job, max_restarts=0)


@pytest.mark.slow  # several workers decode or compute
def test_restarts_are_counted_for_each_worker(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    both = threading.Barrier(2)

    def before(worker: Any, task: DecodeTask) -> None:
        both.wait(LIMIT_S)
        raise WorkerLostError("gone", worker.rank)

    workers = tile_pools(2, before)
    assert torch.equal(_decode(workers, job, max_restarts=1), alone)
    assert len(workers.all) == 4


@pytest.mark.slow  # several workers decode or compute
def test_the_other_workers_decode_while_a_lost_one_is_replaced(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    all_decoded = threading.Event()

    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 1:
            raise WorkerLostError("gone", 1)

    def replace_late(rank: int) -> Any:
        assert all_decoded.wait(LIMIT_S), "no tiles were decoded during the replacement"
        time.sleep(0.2)  # a decode would have returned meanwhile if it did not wait
        return replace_now(rank)

    def on_tile(done: int, total: int) -> None:
        if done == total:
            all_decoded.set()

    workers = tile_pools(2, before)
    replace_now, workers.replace = workers.replace, replace_late
    assert torch.equal(_decode(workers, job, on_tile=on_tile), alone)
    assert workers.workers[0].tiles == 2 * len(TILING.tiles(9, 14))
    assert len(workers.all) == 3, (
        "the decode ends after the replacement, so that the next run can use the pool"
    )


@pytest.mark.slow  # several workers decode or compute
def test_a_replacement_that_is_lost_too_counts_and_any_other_failure_of_it_ends_the_decode(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    def before(worker: Any, task: DecodeTask) -> None:
        raise WorkerLostError("gone", 0)

    def failing(*errors: Exception) -> Any:
        workers = tile_pools(1, before)
        remaining, replace_now = list(errors), workers.replace

        def replace_later(rank: int) -> Any:
            if remaining:
                raise remaining.pop(0)
            return replace_now(rank)

        workers.replace = replace_later
        return workers

    lost = WorkerLostError("it does not start", 0)
    assert torch.equal(_decode(failing(lost), job, max_restarts=2), alone)
    with pytest.raises(
        RestartLimitError, match="it does not start\ngiving up after 1 worker restarts"
    ):
        _decode(failing(lost), job, max_restarts=1)
    with pytest.raises(OSError, match="Ray has ended"):
        _decode(failing(OSError("Ray has ended")), job, max_restarts=9)


def lose(workers: Any, *ranks: int) -> None:
    """End some `ThreadPool` workers between two decodes."""
    for rank in ranks:
        lost = WorkerLostError("gone between two decodes", rank)

        def call(method: str, *_: Any, lost: WorkerLostError = lost) -> Future[Any]:
            answer: Future[Any] = Future()
            answer.set_exception(lost)
            return answer

        workers.workers[rank].call = call


@pytest.mark.slow  # several workers decode or compute
def test_workers_that_are_lost_before_a_decode_are_replaced_and_not_counted(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    workers = tile_pools(3)
    lose(workers, 0, 2)
    assert torch.equal(_decode(workers, job, max_restarts=0), alone)
    assert sorted(worker.rank for worker in workers.all) == [0, 0, 1, 2, 2]
    assert torch.equal(_decode(workers, job, max_restarts=0), alone)
    assert len(workers.all) == 5


def test_a_worker_that_cannot_be_replaced_before_a_decode_ends_it(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    workers = tile_pools(2)
    lose(workers, 1)

    def refuse(rank: int) -> None:
        raise OSError(f"no slot for {rank}")

    workers.replace = refuse
    with pytest.raises(OSError, match="no slot for 1"):
        _decode(workers, job, max_restarts=9)


def test_a_cancel_does_not_wait_for_a_replacement_before_a_decode(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    workers, go_on = tile_pools(1), threading.Event()
    lose(workers, 0)
    begun = threading.Event()

    def replace_late(rank: int) -> None:
        begun.set()
        go_on.wait(LIMIT_S)

    workers.replace = replace_late
    began = time.monotonic()
    try:
        with pytest.raises(DecodeCancelled):
            _decode(workers, job, check=stop_when(begun.is_set))
        assert time.monotonic() - began < LIMIT_S / 2
    finally:
        go_on.set()


def test_a_decode_waits_for_a_replacement_only_until_the_timeout(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    replacing, go_on = threading.Event(), threading.Event()

    def before(worker: Any, task: DecodeTask) -> None:
        raise WorkerLostError("gone", 0)

    def replace_late(rank: int) -> None:
        replacing.set()
        go_on.wait(LIMIT_S)

    workers = tile_pools(1, before)
    workers.replace = replace_late
    began = time.monotonic()
    try:
        with pytest.raises(DecodeCancelled):
            _decode(workers, job, timeout_s=0.2, check=stop_when(replacing.is_set))
        assert 0.2 <= time.monotonic() - began < LIMIT_S / 2
    finally:
        go_on.set()


def test_the_time_limit_of_a_tile_starts_with_it(
    tile_pools: Callable[..., Any], job: DecodeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wanstream.distributed.driver.heartbeat.OPENING_S", 0.0)
    go_on = threading.Event()
    workers = tile_pools(1, lambda worker, task: go_on.wait(LIMIT_S))
    group, tile = (
        TileGroup(workers, 0, [job], 0.25),
        Assignment(GroupId(0, 0), item=0, steps=range(1)),
    )
    time.sleep(0.6)  # longer than twice the timeout: other workers may take all tiles for so long
    try:
        assert group.start(tile, queue.SimpleQueue()).check_time() is None
        assert not workers.workers[0].killed
    finally:
        go_on.set()


@pytest.mark.slow  # several workers decode or compute
def test_a_decode_that_is_stopped_leaves_workers_that_decode(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    workers = tile_pools(2)
    with pytest.raises(DecodeCancelled, match="by the test"):
        _decode(workers, job, check=stop_when(lambda: True))
    asked: list[int] = []

    def after_a_tile() -> bool:
        asked.append(sum(worker.tiles for worker in workers.workers))
        return asked[-1] > 0

    with pytest.raises(DecodeCancelled, match="by the test"):
        _decode(workers, job, check=stop_when(after_a_tile))
    assert torch.equal(_decode(workers, job), alone)
    assert not any(worker.killed for worker in workers.workers)


def test_a_worker_that_does_not_stop_is_ended(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    go_on = threading.Event()

    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 1:
            go_on.wait(LIMIT_S)

    workers = tile_pools(2, before)
    with pytest.raises(DecodeCancelled):
        _decode(workers, job, timeout_s=0.1, check=stop_when(lambda: workers.workers[0].tiles > 0))
    assert [worker.killed for worker in workers.workers] == [False, True]
    assert len(workers.workers[1].stopped) == 1, "it was asked before"
    go_on.set()


def test_what_is_wrong_with_the_vae_is_told_once(
    tile_pools: Callable[..., Any], job: DecodeTask, tmp_path: Path
) -> None:
    bad = DecodeTask(latents=job.latents, vae=tmp_path / "nothing")
    with pytest.raises(MissingPathError, match="nothing does not exist on node-0 and node-1"):
        _decode(tile_pools(2), bad)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(CheckpointFileError, match="broken"):
        _decode(tile_pools(2), replace(job, vae=broken))


def test_a_vae_that_is_missing_on_one_machine_is_told_before_anything_is_decoded(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    workers = tile_pools(2)
    workers.workers[1].missing = (str(job.vae),)
    with pytest.raises(
        MissingPathError, match=rf"{job.vae} does not exist on node-1: copy the file there"
    ):
        _decode(workers, job)
    assert [worker.tiles for worker in workers.workers] == [0, 0]


@pytest.mark.slow  # several workers decode or compute
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_worker_that_hangs_in_a_tile_is_ended_and_replaced(
    max_restarts: int, tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    """The worker hangs in its second tile, some frames after the start."""
    go_on = threading.Event()

    def before(worker: Any, task: DecodeTask) -> None:
        if worker.rank == 0:
            time.sleep(
                0.02
            )  # on a busy machine this worker could make all tiles before the other takes a second
        if worker.rank == 1 and worker.tiles == 1:
            enough, until = worker.begun + 3, time.monotonic() + LIMIT_S
            while worker.begun < enough and time.monotonic() < until:
                time.sleep(0.01)
            worker.hangs = True
            go_on.wait(LIMIT_S)

    workers = tile_pools(2, before)
    hung, one = workers.workers[1], replace(job, latents=job.latents[:1])
    try:
        if max_restarts:
            assert torch.equal(_decode(workers, one, timeout_s=0.2, max_restarts=1), alone[:1])
            assert len(workers.all) == 3
        else:
            with pytest.raises(
                RestartLimitError, match=r"worker 1 began no frame for 0\.4 s and was killed"
            ):
                _decode(workers, one, timeout_s=0.2, max_restarts=0)
        assert hung.killed
    finally:
        go_on.set()


@pytest.mark.slow  # several workers decode or compute
def test_the_vae_is_found_where_the_path_map_says(
    tile_pools: Callable[..., Any], job: DecodeTask, alone: torch.Tensor
) -> None:
    here = Path("/nowhere/models")
    maps = (PathMap(here=str(here), there=str(job.vae.parent)),)
    elsewhere = replace(job, vae=here / job.vae.name)
    assert torch.equal(_decode(tile_pools(2), elsewhere, paths=maps), alone)


def test_latents_of_another_shape_are_refused_before_anybody_is_asked(
    tile_pools: Callable[..., Any], job: DecodeTask
) -> None:
    flat = DecodeTask(latents=torch.zeros(16, 2, 8, 8), vae=job.vae)
    workers = tile_pools(1)
    with pytest.raises(VaeInputError, match="give"):
        _decode(workers, flat)
    assert workers.workers[0].freed == 0


class ShortOnce(TileDecoder):
    """Decoder with one out-of-memory error."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.short = True

    def decode(self, task: DecodeTask, is_stopped: Callable[[], bool]) -> torch.Tensor:
        if self.short:
            self.short = False
            raise torch.OutOfMemoryError("no room beside the experts")
        return super().decode(task, is_stopped)


@pytest.mark.slow  # several workers decode or compute
def test_a_worker_decodes_where_its_experts_have_made_room(
    make_task: Callable[..., RunTask],
    tiny_pipeline: Callable[[], Path],
    latents: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wanstream.distributed.worker.worker.TileDecoder", ShortOnce)
    worker = Worker("cpu")
    tile = DecodeTask(run_id="tile", vae=tiny_pipeline(), latents=latents[:1, :, :, :4, :4])
    try:
        before = latents_of(worker, make_task())
        worker.join(
            RendezvousSpec(
                rank=0, mesh=Mesh(), host="127.0.0.1", port=1, generation=5, timeout_s=10
            )
        )
        decoded = worker.decode_tile(tile)
        assert worker.facts().generation == 0, (
            "its group must not go on without what lay in its buffers"
        )
        assert torch.equal(decoded, TileDecoder(torch.device("cpu")).decode(tile, lambda: False))
        after = latents_of(worker, make_task())
        assert torch.equal(before, after), "the experts are opened again"
        worker.stop("tile")
        with pytest.raises(DecodeCancelled, match="tile"):
            worker.decode_tile(tile)
        worker.free_vae()
    finally:
        worker.close()
