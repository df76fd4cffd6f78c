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
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...devices import is_out_of_memory
from ...schema import WorkersRef
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
from ..messages import DecodeTask, WorkerFacts
from ..transport.path_map import check_paths
from ..transport.pool import Pool, WorkerHandle, WorkerLostError, replace_lost
from .heartbeat import Heartbeat

POLL_S = 0.05
"""Interval at which the driver calls `check` while it waits for tiles."""
FACTS_TIMEOUT_S = 30.0
"""Time for workers to report whether they have the VAE; of a slower worker, a missing VAE fails the first tile."""
EARLY_TILES = 2
"""Tiles per worker that may be decoded ahead of the next one to be blended."""


def decode_in_shared_tiles(
    pool: Pool,
    ref: WorkersRef,
    task: DecodeTask,
    tiling: Tiling,
    needs: DecodeNeeds,
    *,
    check: Callable[[], None] = lambda: None,
    on_tile: Callable[[int, int], None] = lambda done, total: None,
    on_change: Callable[[str], None] = lambda change: None,
) -> torch.Tensor:
    """Decode all videos of `task` -> frames [B, 4(T - 1) + 1, H, W, 3] in 0..1, fp32 on the CPU.

    When a worker runs out of memory, the decode starts again with smaller tiles. Each try counts its tiles from 0 and
    replaces up to `max_restarts` workers. A worker that begins no frame for longer than its heartbeat's limit counts as
    lost; one that does not stop within `timeout_s` is killed.

    Args:
        ref: how long workers may be silent, how many losses are survived, and where their files are.
        task: videos [B, C, T, h, w] of either latent space of Wan; a worker gets one tile of them at a time.
        needs: memory needs of the whole decode.
        check: called often on this thread; may raise to cancel, after which the workers are stopped too.
        on_tile: called on this thread with the number of decoded tiles and of all tiles.
        on_change: called with the change before every retry.

    Raises:
        MissingPathError: the VAE is missing on the machine of a worker; the message names it.
        WorkerLostError: more than `max_restarts` workers were lost.
        VaeInputError, CheckpointFileError: as `WanVae.decode`; the first error of a worker.
        DecodeOutOfMemoryError: a worker has too little memory for the smallest tiles.
    """
    check_latents(task.latents)

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than a tiling are a tiling too"
        decode = _Decode(pool, ref, replace(task, run_id=uuid.uuid4().hex, paths=ref.paths), tiling)
        try:
            return decode.run(check, on_tile)
        finally:
            decode.end()

    return retry_with_smaller_tiles(attempt, needs, tiling, on_change, is_oom=_is_short)


class _TileInFlight(NamedTuple):
    """Tile that a worker is decoding."""

    number: int
    worker: WorkerHandle
    heartbeat: Heartbeat


class _Decode:
    """State of one decode: waiting tiles, tiles in flight by worker, and the blended frames."""

    def __init__(self, pool: Pool, ref: WorkersRef, task: DecodeTask, tiling: Tiling) -> None:
        self._pool, self._task, self._tiling = pool, task, tiling
        self._restarts_left, self._timeout_s = ref.max_restarts, ref.timeout_s
        self._videos = task.latents.split(1)
        tiles = tiling.tiles(*task.latents.shape[3:])
        self._columns = max(tile.column for tile in tiles) + 1
        self._tiles = [(video, tile) for video in range(len(self._videos)) for tile in tiles]
        self._waiting = list(range(len(self._tiles)))
        self._lost: list[int] = []
        """Ranks of lost workers that were not replaced yet."""
        self._in_flight: dict[Future[torch.Tensor], _TileInFlight] = {}
        self._frames = empty_frames(task.latents)
        self._blenders = [TileBlender(tiling, into=frames) for frames in self._frames]

    def run(self, check: Callable[[], None], on_tile: Callable[[int, int], None]) -> torch.Tensor:
        limit_s, paths = min(self._timeout_s, FACTS_TIMEOUT_S), self._task.paths
        check_paths(_facts(self._pool, check, limit_s, [str(self._task.vae)], paths), paths)
        while self._waiting or self._in_flight:
            check()
            self._submit_tiles()
            for future in wait(self._in_flight, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
                number, worker, _ = self._in_flight.pop(future)
                try:
                    decoded = future.result()
                except WorkerLostError as err:
                    self._lose(number, worker, err)
                else:
                    video, tile = self._tiles[number]
                    self._blenders[video].put(tile, decoded)
                    on_tile(len(self._tiles) - len(self._waiting) - len(self._in_flight), len(self._tiles))
            self._kill_hung()
            replace_lost(self._pool, self._lost)
            self._lost = []
        return self._frames

    def end(self) -> None:
        """Stop all tiles in flight and release the VAE's weights on the workers. Errors of these tiles are ignored."""
        for tile in self._in_flight.values():
            tile.worker.call("stop", self._task.run_id)
        for future in wait(self._in_flight, timeout=self._timeout_s).not_done:
            self._in_flight[future].worker.kill()
        wait([worker.call("free_vae") for worker in self._pool.workers], timeout=self._timeout_s)

    def _submit_tiles(self) -> None:
        """Submit the next tile to every idle worker, unless it is too far ahead of the next one to be blended."""
        busy = {tile.worker.rank for tile in self._in_flight.values()}
        # Tiles that are decoded early stay in RAM until their neighbours are blended.
        first_missing = min([*self._waiting[:1], *(tile.number for tile in self._in_flight.values())])
        furthest = first_missing + self._columns + EARLY_TILES * len(self._pool.workers)
        for worker in self._pool.workers:
            if worker.rank in busy or not self._waiting or self._waiting[0] > furthest:
                continue
            number = self._waiting.pop(0)
            video, tile = self._tiles[number]
            task = replace(self._task, latents=crop(self._videos[video], tile).contiguous())
            future = worker.call("decode_tile", task)
            self._in_flight[future] = _TileInFlight(number, worker, Heartbeat([worker], self._timeout_s))

    def _kill_hung(self) -> None:
        """Kill workers that hang in a tile; they are lost."""
        for future, (number, worker, heartbeat) in list(self._in_flight.items()):
            if heartbeat.is_overdue():
                worker.kill()
                del self._in_flight[future]
                message = f"worker {worker.rank} began no frame for {heartbeat.limit_s:g} s and was killed"
                error = WorkerLostError(f"{message}\n{worker.log_tail()}".strip(), worker.rank)
                self._lose(number, worker, error)

    def _lose(self, number: int, worker: WorkerHandle, error: WorkerLostError) -> None:
        """Record a lost worker and queue its tile again; raise `error` if no restarts are left."""
        if self._restarts_left == 0:
            raise error
        self._restarts_left -= 1
        self._lost.append(worker.rank)
        self._waiting = sorted([number, *self._waiting])


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
