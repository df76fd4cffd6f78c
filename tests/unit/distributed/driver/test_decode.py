"""Shared decode: bit-equal to one VAE, few tiles at a time, and lost, stopped or full workers."""

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from wanstream.distributed.driver import decode as shared_decode
from wanstream.distributed.driver import heartbeat
from wanstream.distributed.driver.stage_run import RestartLimitError
from wanstream.distributed.messages import DecodeCancelled, DecodeTask, RendezvousSpec
from wanstream.distributed.path_map import MissingPathError
from wanstream.distributed.plan.jobs import Assignment, GroupId
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.worker.worker import TileDecoder, Worker, decode_budget
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.schema import Mesh
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.tests.support.distributed.reports import latents_of
from wanstream.tests.support.distributed.tile_pool import ThreadPool
from wanstream.wan.vae.memory import DecodeNeeds, VaeMemoryError
from wanstream.wan.vae.tiles import Tiling, TilingError
from wanstream.wan.vae.vae import DecodeOutOfMemoryError, VaeInputError, open_vae

TILING = Tiling(pixels=64, stride=48)
NEEDS = DecodeNeeds(height=72, width=112, frames=1, pixel_bytes=1, value_bytes=4, keeps_frames=True)
TILES = 2 * len(TILING.tiles(9, 14))
LIMIT_S = 60.0
SLOW = pytest.mark.slow  # several workers decode or compute


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return 3 * torch.randn(2, 16, 1, 9, 14, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def alone(tiny_pipeline, latents):
    with open_vae(tiny_pipeline()) as vae:
        return vae.decode(latents, device="cpu", tiling=TILING)


@pytest.fixture
def tile_pools():
    """`tile_pools(count, before=...)` makes a `ThreadPool`."""
    with ExitStack() as undo:

        def make(count, before=lambda worker, task: None):
            return undo.enter_context(closing(ThreadPool(count, before)))

        yield make


@pytest.fixture
def job(tiny_pipeline, latents):
    return DecodeTask(latents=latents, vae=tiny_pipeline())


@pytest.fixture
def decode(job, alone):
    """`decode(pool, task=job, wanted=alone, **options)` decodes and checks the frames.

    The options are arguments of the decode, `stop`, and `limits` of the `WorkersRef`.
    """
    limits = {"max_restarts": 1, "timeout_s": LIMIT_S, "paths": ()}

    def run(pool, task=job, wanted=alone, *, stop=bool, check=bool, **options):
        def check_both() -> None:
            check()
            if stop():
                raise DecodeCancelled("stopped by the test")

        given = {name: options.pop(name, usual) for name, usual in limits.items()}
        ref = WorkersRef(count=len(pool.workers), **given)
        how = {"tiling": TILING, "needs": NEEDS, "check": check_both, **options}
        frames = shared_decode.decode_in_shared_tiles(pool, ref, task, **how)
        assert wanted is None or torch.equal(frames, wanted)
        return frames

    return run


def gone(*ranks, tiles=0):
    """Lose these workers, or all, before a tile."""

    def before(worker, task):
        if worker.tiles == tiles and (not ranks or worker.rank in ranks):
            raise WorkerLostError("gone for good", worker.rank)

    return before


@contextmanager
def in_time(at_least_s=0.0):
    """Yield an event for what hangs. The block must end early enough, and sets the event then."""
    go_on = threading.Event()
    began = time.monotonic()
    try:
        yield go_on
        assert at_least_s <= time.monotonic() - began < LIMIT_S / 2
    finally:
        go_on.set()


def test_frames_are_those_of_one_worker(tile_pools, job, decode):
    """The workers find the VAE where the path map says."""
    told: list[tuple[int, int]] = []
    pool = tile_pools(2)
    here = Path("/nowhere/models")
    maps = (PathMap(here=str(here), there=str(job.vae.parent)),)
    elsewhere = replace(job, vae=here / job.vae.name)
    decode(pool, elsewhere, paths=maps, on_tile=lambda *tiles: told.append(tiles))
    assert told == [(done, TILES) for done in range(1, TILES + 1)]
    assert sum(worker.tiles for worker in pool.workers) == TILES
    assert [worker.freed for worker in pool.workers] == [1, 1]


@SLOW
@pytest.mark.parametrize("tiling", [TILING, Tiling.of(128)], ids=["tiles", "whole frames"])
def test_a_worker_gets_the_latents_of_its_tile_only(tiling, tile_pools, decode):
    sizes: list[tuple[int, int]] = []

    def before(worker, task):
        sizes.append((task.latents.untyped_storage().nbytes(), task.latents.nbytes))
        assert task.latents.is_contiguous()

    decode(tile_pools(1, before), wanted=None, tiling=tiling)
    assert len(sizes) == 2 * len(tiling.tiles(9, 14))
    assert all(stored == used for stored, used in sizes), "a pickled tensor has its whole storage"


@SLOW
def test_workers_compute_in_the_dtype_that_is_asked_for(tile_pools, job, decode):
    pool = tile_pools(2)
    small = replace(job, latents=job.latents[:1, :, :1, :9, :4])
    with open_vae(job.vae, torch.bfloat16) as vae:
        wanted = vae.decode(small.latents, device="cpu", tiling=TILING)
    halves = decode(pool, replace(small, dtype=torch.bfloat16), wanted)
    assert not torch.equal(halves, decode(pool, small, None))
    decode(pool)  # the same workers, in fp32 again


@SLOW
def test_slow_tile_limits_the_tiles_in_memory(tile_pools, decode):
    ahead = threading.Event()
    go_on = threading.Event()
    done: list[int] = []
    early: list[int] = []

    def before(worker, task):
        if worker.rank == 0 and not ahead.is_set():
            ahead.set()
            assert go_on.wait(LIMIT_S), "nobody stopped to hand out tiles"

    def look() -> None:
        # The driver polls again and leaves an idle worker idle: it has submitted all tiles it may.
        worker = pool.workers[1]
        done.append(worker.tiles if worker.tiles == worker.given else -1)
        is_idle = len(done) > 3 and done[-1] == done[-2] == done[-3] >= 0
        if ahead.is_set() and is_idle and not go_on.is_set():
            early.append(done[-1])
            go_on.set()

    pool = tile_pools(2, before)
    decode(pool, check=look)
    columns = max(tile.column for tile in TILING.tiles(9, 14)) + 1
    assert early == [columns + shared_decode.EARLY_TILES * 2]


def test_a_lost_worker_is_replaced_and_its_tile_made_again(tile_pools, decode):
    pool = tile_pools(2, gone(1, tiles=1))
    decode(pool)
    assert len(pool.all) == 3
    with pytest.raises(RestartLimitError, match="gone for good\ngiving up after 0 worker restarts"):
        decode(tile_pools(2, gone()), max_restarts=0)


@SLOW
def test_the_other_workers_decode_while_a_lost_one_is_replaced(tile_pools, decode):
    all_decoded = threading.Event()

    def replace_late(rank):
        assert all_decoded.wait(LIMIT_S), "no tiles were decoded during the replacement"
        time.sleep(0.2)  # a decode would have returned meanwhile if it did not wait
        return replace_now(rank)

    pool = tile_pools(2, gone(1))
    replace_now = pool.replace
    pool.replace = replace_late
    decode(pool, on_tile=lambda done, total: all_decoded.set() if done == total else None)
    assert pool.workers[0].tiles == TILES
    # The decode ends after the replacement, so that the next run can use the pool.
    assert len(pool.all) == 3


@SLOW
def test_failures_of_a_replacement(tile_pools, decode):
    def failing(error):
        pool = tile_pools(1, gone())
        pool.replace = mock.Mock(wraps=pool.replace, side_effect=[error, mock.DEFAULT])
        return pool

    lost = WorkerLostError("it does not start", 0)
    decode(failing(lost), max_restarts=2)
    with pytest.raises(RestartLimitError, match="not start\ngiving up after 1 worker restarts"):
        decode(failing(lost), max_restarts=1)
    with pytest.raises(OSError, match="Ray has ended"):
        decode(failing(OSError("Ray has ended")), max_restarts=9)


def lose(pool, *ranks):
    """End some workers between two decodes, and return the pool."""
    for rank in ranks:
        answer = Future()
        answer.set_exception(WorkerLostError("gone between two decodes", rank))
        pool.workers[rank].call = lambda method, *_, answer=answer: answer
    return pool


@SLOW
def test_workers_lost_before_a_decode_are_replaced(tile_pools, decode):
    pool = lose(tile_pools(3), 0, 2)
    for _ in range(2):
        decode(pool, max_restarts=0)
        assert sorted(worker.rank for worker in pool.all) == [0, 0, 1, 2, 2]


def test_worker_without_replacement_ends_a_decode(tile_pools, decode):
    pool = lose(tile_pools(2), 1)
    pool.replace = mock.Mock(side_effect=OSError("no slot for 1"))
    with pytest.raises(OSError, match="no slot for 1"):
        decode(pool, max_restarts=9)
    pool.replace.assert_called_once_with(1)


@pytest.mark.parametrize("waits_s", [0.0, 0.2], ids=["before", "during"])
def test_cancel_waits_for_a_replacement_up_to_the_timeout(waits_s, tile_pools, decode):
    pool = tile_pools(1, gone()) if waits_s else lose(tile_pools(1), 0)
    replacing = threading.Event()
    with in_time(waits_s) as go_on:
        pool.replace = lambda rank: replacing.set() or go_on.wait(LIMIT_S)
        with pytest.raises(DecodeCancelled):
            decode(pool, timeout_s=waits_s or LIMIT_S, stop=replacing.is_set)


def test_the_time_limit_of_a_tile_starts_with_it(tile_pools, job, monkeypatch):
    monkeypatch.setattr(heartbeat, "OPENING_S", 0.0)
    with in_time() as go_on:
        pool = tile_pools(1, lambda worker, task: go_on.wait(LIMIT_S))
        group = shared_decode.TileGroup(pool, 0, [job], 0.1)
        time.sleep(0.25)  # longer than twice the timeout: others may take all tiles for so long
        tile = Assignment(GroupId(0, 0), item=0, steps=range(1))
        assert group.start(tile, queue.SimpleQueue()).check_time() is None
        assert not pool.workers[0].killed


@SLOW
def test_a_decode_that_is_stopped_leaves_workers_that_decode(tile_pools, decode):
    pool = tile_pools(2)
    for tiles in (0, 1):
        with pytest.raises(DecodeCancelled, match="by the test"):
            decode(pool, stop=lambda most=tiles: sum(w.tiles for w in pool.workers) >= most)
    decode(pool)
    assert not any(worker.killed for worker in pool.workers)


def test_a_worker_that_does_not_stop_is_ended(tile_pools, decode):
    with in_time() as go_on:
        pool = tile_pools(2, lambda worker, _: worker.rank == 1 and go_on.wait(LIMIT_S))
        with pytest.raises(DecodeCancelled):
            decode(pool, timeout_s=0.1, stop=lambda: pool.workers[0].tiles > 0)
        assert [worker.killed for worker in pool.workers] == [False, True]
        assert len(pool.workers[1].stopped) == 1, "it was asked before"


def test_a_bad_vae_is_told_once_before_anything_is_decoded(tile_pools, job, decode, tmp_path):
    nowhere = replace(job, vae=tmp_path / "nothing")
    with pytest.raises(MissingPathError, match="nothing does not exist on node-0 and node-1"):
        decode(tile_pools(2), nowhere)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointFileError, match="broken"):
        decode(tile_pools(2), replace(job, vae=tmp_path / "broken.safetensors"))
    pool = tile_pools(2)
    pool.workers[1].missing = (str(job.vae),)
    said = rf"{job.vae} does not exist on node-1: copy the file there"
    with pytest.raises(MissingPathError, match=said):
        decode(pool)
    assert [worker.tiles for worker in pool.workers] == [0, 0]


@SLOW
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_worker_that_hangs_in_a_tile_is_ended_and_replaced(
    max_restarts, tile_pools, job, alone, decode
):
    """The worker hangs in its second tile, some frames after the start."""

    def before(worker, task):
        if worker.rank == 0:
            # On a busy machine this worker could make all tiles before the other takes a second.
            time.sleep(0.02)
        if worker.rank == 1 and worker.tiles == 1:
            enough = worker.begun + 3
            until = time.monotonic() + LIMIT_S
            while worker.begun < enough and time.monotonic() < until:
                time.sleep(0.01)
            worker.hangs = True
            go_on.wait(LIMIT_S)

    one = replace(job, latents=job.latents[:1])
    with in_time() as go_on:
        pool = tile_pools(2, before)
        hung = pool.workers[1]
        if max_restarts:
            decode(pool, one, alone[:1], timeout_s=0.2)
            assert len(pool.all) == 3
        else:
            said = r"worker 1 began no frame for 0\.4 s and was killed"
            with pytest.raises(RestartLimitError, match=said):
                decode(pool, one, timeout_s=0.2, max_restarts=0)
        assert hung.killed


def test_latents_of_another_shape_are_refused(tile_pools, job, decode):
    pool = tile_pools(1)
    with pytest.raises(VaeInputError, match="give"):
        decode(pool, replace(job, latents=torch.zeros(16, 2, 8, 8)))
    assert pool.workers[0].freed == 0


class ShortOnce(TileDecoder):
    """Decoder with one out-of-memory error."""

    short = True

    def decode(self, task, is_stopped):
        if self.short:
            self.short = False
            raise torch.OutOfMemoryError("no room beside the experts")
        return super().decode(task, is_stopped)


@SLOW
def test_a_worker_decodes_where_its_experts_have_made_room(make_task, job, monkeypatch):
    monkeypatch.setattr("wanstream.distributed.worker.worker.TileDecoder", ShortOnce)
    worker = Worker("cpu")
    tile = replace(job, run_id="tile", latents=job.latents[:1, :, :, :4, :4])
    place = {"rank": 0, "mesh": Mesh(), "host": "127.0.0.1", "port": 1, "generation": 5}
    with closing(worker):
        before = latents_of(worker, make_task())
        worker.join(RendezvousSpec(**place, timeout_s=10))
        decoded = worker.decode_tile(tile)
        # Its group must not go on without what lay in its buffers.
        assert worker.facts().generation == 0
        assert torch.equal(decoded, TileDecoder(torch.device("cpu")).decode(tile, lambda: False))
        assert torch.equal(before, latents_of(worker, make_task())), "the experts are opened again"
        worker.stop("tile")
        with pytest.raises(DecodeCancelled, match="tile"):
            worker.decode_tile(tile)
        worker.free_vae()


WIDE = 3 * torch.randn(1, 16, 1, 11, 12, generator=torch.Generator().manual_seed(0))
GB = 10**9
FILM = {"height": 60, "width": 104, "frames": 81, "pixel_bytes": 1_463_000}
LONG = DecodeNeeds(**FILM, value_bytes=4, keeps_frames=True)


@pytest.fixture
def decode_wide(decode, job):
    """`decode_wide(pool, **changes)` decodes `WIDE` with tiles of 88 pixels, without restarts."""
    with open_vae(job.vae) as vae:
        needs = vae.decode_needs(WIDE)
    given = {"wanted": None, "tiling": Tiling.of(88), "needs": needs, "max_restarts": 0}
    return lambda pool, **changes: decode(pool, replace(job, latents=WIDE), **given, **changes)


def no_room_above(size):
    """Return a callback to fail the first worker's tiles wider than `size` latents."""

    def before(worker, task):
        if worker.rank == 0 and task.latents.shape[4] > size:
            raise torch.OutOfMemoryError("no room for a tile")

    return before


@SLOW
def test_memory_that_runs_out_on_a_worker_leads_to_smaller_tiles(tile_pools, decode_wide, job):
    told: list[str] = []
    done: list[tuple[int, int]] = []
    workers = tile_pools(2, no_room_above(8))
    made = decode_wide(workers, on_change=told.append, on_tile=lambda *tiles: done.append(tiles))
    with open_vae(job.vae) as alone:
        assert torch.equal(made, alone.decode(WIDE, device="cpu", tiling=Tiling.of(64)))
    assert told == ["no memory for decoding tiles of 88 pixels: retrying with tiles of 64 pixels"]
    tiles = len(Tiling.of(64).tiles(11, 12))
    assert done[-tiles:] == [(number, tiles) for number in range(1, tiles + 1)]
    # Nothing of a try is left for the next one.
    assert [worker.freed for worker in workers.workers] == [2, 2]
    assert not any(worker.killed for worker in workers.workers)


def test_no_memory_for_the_smallest_tile(tile_pools, decode_wide):
    said = "tiles of 64 pixels, the smallest size: no room for a tile"
    with pytest.raises(DecodeOutOfMemoryError, match=said):
        decode_wide(tile_pools(2, no_room_above(3)))


def test_a_lost_worker_is_no_shortage_whatever_its_log_says(tile_pools, decode_wide):
    def lose(worker, *_):
        raise WorkerLostError("gone; its log: can't allocate memory", worker.rank)

    told: list[str] = []
    with pytest.raises(RestartLimitError, match="gone"):
        decode_wide(tile_pools(2, lose), on_change=told.append)
    assert told == []


UNKNOWN = RuntimeError("no figures")


class Telling:
    """Pool whose workers return facts, raise or are silent. Replacements return `later`."""

    def __init__(self, told, later):
        self.workers = [self._worker(each) for each in told]
        self._later = later

    def replace(self, rank):
        assert self._later is not None, "no worker is lost"
        self.workers[rank] = self._worker(self._later)

    def _worker(self, told):
        answer = Future()
        if isinstance(told, Exception):
            answer.set_exception(told)
        elif told is not None:
            answer.set_result(told)
        return SimpleNamespace(call={"facts": answer}.__getitem__)


def facts(tile_bytes):
    return replace(Worker("cpu").facts(), device="cuda:0", tile_bytes=tile_bytes)


def tiles(*told, later=None, **changes):
    given = {"weight_bytes": GB, "memory_bytes": 0, "videos": 1, **changes}
    return shared_decode.tiles_by_memory(Telling(told, later), LONG, **given)


def test_lost_workers_are_replaced_before_planning():
    lost = WorkerLostError("gone", 1)
    assert tiles(facts(80 * GB), lost, later=facts(2 * GB)) == tiles(facts(80 * GB), facts(2 * GB))
    # It is replaced once only.
    assert tiles(facts(2 * GB), lost, later=lost) == tiles(facts(2 * GB), UNKNOWN)


def test_the_worker_that_has_least_decides():
    small = tiles(facts(80 * GB), facts(2 * GB))
    assert small == tiles(facts(2 * GB), facts(2 * GB))
    assert LONG.device_bytes(small) <= GB < LONG.device_bytes(Tiling.of(320))
    assert tiles(facts(80 * GB), facts(80 * GB)).pixels > small.pixels
    # A budget of the user has no effect beyond the free memory.
    assert tiles(facts(80 * GB), facts(80 * GB), memory_bytes=GB) == small
    assert tiles(facts(2 * GB), facts(2 * GB), memory_bytes=50 * GB) == small


def test_workers_on_cpus_share_the_ram_of_their_machine():
    room = LONG.device_bytes(None)
    here = replace(facts(room), device="cpu", machine="here")
    alone = tiles(here, weight_bytes=0)
    two = tiles(here, here, weight_bytes=0)
    assert LONG.fit(alone, room, shared=True), "frames lie in the same memory"
    assert LONG.fit(two, room // 2, shared=True)
    assert two.pixels < alone.pixels
    # Machines that were cloned may share a host name. One that reports no memory is not counted.
    there = replace(here, machine="there")
    assert there.node == here.node
    assert tiles(here, there, weight_bytes=0) == tiles(here, UNKNOWN, weight_bytes=0)


def test_too_little_memory_and_none_that_is_known_are_refused():
    with pytest.raises(VaeMemoryError, match=r"0\.00 GB given"):
        tiles(facts(GB // 2), facts(80 * GB))
    with pytest.raises(TilingError, match=r"no worker reported .* within 30 s: set tile_size"):
        tiles(UNKNOWN)


def test_a_cancel_ends_the_asking():
    with pytest.raises(KeyboardInterrupt):
        tiles(None, check=mock.Mock(side_effect=KeyboardInterrupt))


def test_a_worker_reports_memory_for_tiles():
    assert Worker("cpu").facts().tile_bytes > 0
    # RAM held by experts is not counted twice.
    assert decode_budget(torch.device("cpu"), 10**15) < 10**15


def test_what_experts_hold_counts_as_room_on_a_gpu(gpu):
    more = decode_budget(gpu.device, GB) - decode_budget(gpu.device, 0)
    assert more == pytest.approx(GB, abs=50_000_000)
