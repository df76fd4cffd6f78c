"""VAE decoding on all workers: the size of shared tiles, and their distribution.

The result is bit-equal to that of one worker with the same tiles. A worker holds one tile at a time. The driver holds
the frames, one row of tiles, and a few tiles that arrived early.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...devices import is_out_of_memory
from ...wan import (
    DecodeNeeds,
    TileBlender,
    Tiling,
    TilingError,
    check_latents,
    crop,
    empty_frames,
    retry_with_smaller_tiles,
    shared_tiling,
)
from ..messages import DecodeCancelled, DecodeTask, WorkerFacts
from ..transport.path_map import check_paths
from ..transport.pool import Pool, WorkerHandle, WorkerLostError
from .heartbeat import Heartbeat, silence_limit

POLL_S = 0.05
"""Interval at which the driver polls `should_stop` while it waits for tiles."""
FACTS_TIMEOUT_S = 30.0
"""Time for workers to report whether they have the VAE; of a slower worker, a missing VAE fails the first tile."""
EARLY_TILES = 2
"""Tiles per worker that may be decoded ahead of the next one to be blended."""


@dataclass(frozen=True, kw_only=True)
class TileDone:
    """Progress of a decode: `done` of `total` tiles of all videos."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeJob(DecodeTask):
    """Videos to be decoded, [B, C, T, h, w] of either latent space of Wan; a worker gets one tile of them at a time."""

    tiling: Tiling


def decode_on_workers(
    pool: Pool,
    job: DecodeJob,
    *,
    max_restarts: int,
    timeout_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_tile: Callable[[TileDone], None] = lambda done: None,
) -> torch.Tensor:
    """Decode all videos of `job` -> frames [B, 4(T - 1) + 1, H, W, 3] in 0..1, fp32 on the CPU.

    `should_stop` and `on_tile` are called on this thread. A worker that does not stop within `timeout_s` is killed. A
    worker that begins no frame for longer than `silence_limit` counts as lost.

    Raises:
        DecodeCancelled: `should_stop` returned True; the workers have stopped too.
        MissingPathError: the VAE is missing on the machine of a worker; the message names it.
        WorkerLostError: more than `max_restarts` workers were lost.
        VaeInputError, CheckpointFileError: as `WanVae.decode`; the first error of a worker.
    """
    check_latents(job.latents)
    decode = _Decode(pool, job, max_restarts, timeout_s)
    try:
        return decode.run(should_stop, on_tile)
    finally:
        decode.end()


class _TileInFlight(NamedTuple):
    """Tile that a worker is decoding."""

    number: int
    worker: WorkerHandle
    heartbeat: Heartbeat


class _Decode:
    """State of one decode: waiting tiles, tiles in flight by worker, and the blended frames."""

    def __init__(self, pool: Pool, job: DecodeJob, max_restarts: int, timeout_s: float) -> None:
        self._pool, self._job, self._max_restarts, self._timeout_s = pool, job, max_restarts, timeout_s
        self._videos = job.latents.split(1)
        tiles = job.tiling.tiles(*job.latents.shape[3:])
        self._columns = max(tile.column for tile in tiles) + 1
        self._tiles = [(video, tile) for video in range(len(self._videos)) for tile in tiles]
        self._waiting = list(range(len(self._tiles)))
        self._done: set[int] = set()
        self._in_flight: dict[Future[torch.Tensor], _TileInFlight] = {}
        self._frames = empty_frames(job.latents)
        self._blenders: dict[int, TileBlender] = {}

    def run(self, should_stop: Callable[[], bool], on_tile: Callable[[TileDone], None]) -> torch.Tensor:
        self._check_vae(should_stop)
        while len(self._done) < len(self._tiles):
            self._check_stop(should_stop)
            self._submit_tiles()
            ended, _ = wait(self._in_flight, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in ended:
                if self._collect(future):
                    on_tile(TileDone(done=len(self._done), total=len(self._tiles)))
            self._kill_hung()
        return self._frames

    def end(self) -> None:
        """Stop all tiles in flight and release the VAE's weights on the workers. Errors of these tiles are ignored."""
        if self._in_flight:
            for tile in self._in_flight.values():
                tile.worker.call("stop", self._job.run_id)
            _, unfinished = wait(self._in_flight, timeout=self._timeout_s)
            for future in unfinished:
                self._in_flight[future].worker.kill()
        wait([worker.call("free_vae") for worker in self._pool.workers], timeout=self._timeout_s)

    def _check_stop(self, should_stop: Callable[[], bool]) -> None:
        if should_stop():
            raise DecodeCancelled(f"the decode was stopped after {len(self._done)} of {len(self._tiles)} tiles")

    def _check_vae(self, should_stop: Callable[[], bool]) -> None:
        """Raise MissingPathError if a worker that responds in time has no VAE."""
        limit_s = min(self._timeout_s, FACTS_TIMEOUT_S)
        check = partial(self._check_stop, should_stop)
        check_paths(_facts(self._pool, check, limit_s, [str(self._job.vae)], self._job.paths), self._job.paths)

    def _submit_tiles(self) -> None:
        """Submit the next tile to every idle worker, unless it is too far ahead of the next one to be blended."""
        busy = {tile.worker.rank for tile in self._in_flight.values()}
        # Tiles that are decoded early stay in RAM until their neighbours are blended.
        furthest = self._first_missing() + self._columns + EARLY_TILES * len(self._pool.workers)
        for worker in self._pool.workers:
            if worker.rank in busy or not self._waiting or self._waiting[0] > furthest:
                continue
            number = self._waiting.pop(0)
            video, tile = self._tiles[number]
            part = crop(self._videos[video], tile).contiguous()
            job = self._job
            task = DecodeTask(run_id=job.run_id, vae=job.vae, latents=part, dtype=job.dtype, paths=job.paths)
            future = worker.call("decode_tile", task)
            self._in_flight[future] = _TileInFlight(number, worker, Heartbeat([worker], self._timeout_s))

    def _first_missing(self) -> int:
        """Return the number of the first tile that is not decoded."""
        return next(number for number in range(len(self._tiles)) if number not in self._done)

    def _collect(self, future: Future[torch.Tensor]) -> bool:
        """Blend a decoded tile and return True; if its worker was lost, replace the worker and return False."""
        number, worker, _ = self._in_flight.pop(future)
        try:
            decoded = future.result()
        except WorkerLostError as err:
            self._replace(number, worker, err)
            return False
        self._blend(number, decoded)
        self._done.add(number)
        return True

    def _kill_hung(self) -> None:
        """Kill and replace workers that hang in a tile."""
        for future, (number, worker, heartbeat) in list(self._in_flight.items()):
            heartbeat.poll()
            limit = silence_limit(self._timeout_s, begun=heartbeat.begun)
            if heartbeat.silence_s > limit:
                worker.kill()
                del self._in_flight[future]
                message = f"worker {worker.rank} began no frame for {limit:g} s and was killed\n{worker.log_tail()}"
                self._replace(number, worker, WorkerLostError(message.strip(), worker.rank))

    def _replace(self, number: int, worker: WorkerHandle, error: WorkerLostError) -> None:
        """Replace a lost worker and queue its tile again; raise `error` if no restarts are left."""
        if self._max_restarts == 0:
            raise error
        self._max_restarts -= 1
        self._pool.replace(worker.rank)
        self._waiting = sorted([number, *self._waiting])

    def _blend(self, number: int, decoded: torch.Tensor) -> None:
        video, tile = self._tiles[number]
        if video not in self._blenders:
            self._blenders[video] = TileBlender(self._job.tiling, into=self._frames[video])
        self._blenders[video].put(tile, decoded)


def tiles_by_memory(
    pool: Pool,
    needs: DecodeNeeds,
    *,
    weight_bytes: int,
    memory_bytes: int,
    videos: int,
    check: Callable[[], None] = lambda: None,
) -> Tiling:
    """Return the tiling in which all workers of `pool` can decode.

    Args:
        needs: memory needs of the whole decode.
        weight_bytes: bytes of the VAE, which every worker loads.
        memory_bytes: limit per worker in addition to the weights; 0: its free memory.
        check: called while the workers report their memory; may raise to cancel.

    Raises:
        VaeMemoryError: the worker with the least memory has too little for the smallest tile.
        TilingError: no worker reported its memory in time.
    """
    facts = _facts(pool, check, FACTS_TIMEOUT_S)
    if not facts:
        raise TilingError(
            f"no worker reported its free memory within {FACTS_TIMEOUT_S:g} s: set tile_size, for example to 256"
        )
    free = max(0, min(_decode_budgets(facts)) - weight_bytes)
    return shared_tiling(
        needs,
        min(free, memory_bytes) if memory_bytes else free,
        shared=any(_on_cpu(each) for each in facts),
        workers=len(pool.workers),
        videos=videos,
    )


def decode_in_shared_tiles(
    pool: Pool,
    job: DecodeJob,
    needs: DecodeNeeds,
    *,
    max_restarts: int,
    timeout_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_tile: Callable[[TileDone], None] = lambda done: None,
    on_change: Callable[[str], None] = lambda change: None,
) -> torch.Tensor:
    """Decode as `decode_on_workers`, and retry with smaller tiles when a worker runs out of memory.

    Each try has a new run id, counts its tiles from 0 and replaces up to `max_restarts` workers. Raises as
    `decode_on_workers` and `retry_with_smaller_tiles`.
    """

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than a tiling are a tiling too"
        retry = replace(job, tiling=tiling, run_id=uuid.uuid4().hex)
        return decode_on_workers(
            pool, retry, max_restarts=max_restarts, timeout_s=timeout_s, should_stop=should_stop, on_tile=on_tile
        )

    return retry_with_smaller_tiles(attempt, needs, job.tiling, on_change, is_oom=_is_short)


def _is_short(error: RuntimeError) -> bool:
    """Return True if a worker reported that it ran out of memory; the log in a WorkerLostError does not count."""
    return not isinstance(error, WorkerLostError) and is_out_of_memory(error)


def _facts(pool: Pool, check: Callable[[], None], limit_s: float, *args: Any) -> list[WorkerFacts]:
    """Return the facts of the workers that respond in time; `args` are those of `Worker.facts`."""
    requests = [worker.call("facts", *args) for worker in pool.workers]
    until = time.monotonic() + limit_s
    while wait(requests, timeout=POLL_S).not_done and time.monotonic() < until:
        check()
    return [each.result() for each in requests if each.done() and each.exception() is None]


def _on_cpu(facts: WorkerFacts) -> bool:
    return facts.device == "cpu"


def _decode_budgets(facts: list[WorkerFacts]) -> list[int]:
    """Return the memory of each worker for a decode: all of a GPU, a share of the RAM of its machine."""
    workers_on = Counter(each.machine for each in facts if _on_cpu(each))
    return [each.tile_bytes // (workers_on[each.machine] if _on_cpu(each) else 1) for each in facts]
