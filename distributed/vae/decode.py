"""Videos decoded by all workers together: every one decodes tiles, the driver puts them together.

The result is that of one worker with the same tiles, bit for bit. A worker holds one tile at a time; the driver holds
the frames, and of the tiles one row and a few that came early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ...schema import PathMap
from ...wan import TileBlender, Tiling, check_latents, crop, empty_frames
from ..driver.heartbeat import Heartbeat, silence_limit
from ..transport.path_map import check_paths
from ..transport.pool import Pool, WorkerHandle, WorkerLostError
from .worker import DecodeCancelled, DecodeTask

LOOK_S = 0.05
"""How often the driver looks whether the user has stopped it while it waits for tiles."""
FACTS_S = 30.0
"""How long workers may take to say whether the VAE is there; of one that takes longer its tiles will tell."""
EARLY_TILES = 2
"""Tiles for each worker that may be done before the one that is due."""


@dataclass(frozen=True, kw_only=True)
class TileDone:
    """How far a decode is: `done` of `total` tiles of all videos."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeJob:
    """What is to be decoded."""

    latents: torch.Tensor
    """[B, C, T, h, w], raw; of either latent space of Wan."""
    tiling: Tiling
    vae: Path
    """Of its file or folder, as it is here."""
    run_id: str
    """By which the workers are told to stop."""
    dtype: torch.dtype = torch.float32
    """Which the VAE computes in; frames are fp32 in any case."""
    paths: tuple[PathMap, ...] = ()
    """Where the VAE lies on the machines of workers."""


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

    `should_stop` and `on_tile` are called on this thread. A worker that does not stop within `timeout_s` is ended, and
    one that begins no frame for as long as `silence_limit` says counts as lost.

    Raises:
        DecodeCancelled: `should_stop` returned True; the workers have stopped too.
        MissingPathError: the VAE is not there on the machine of a worker; says where.
        WorkerLostError: one more worker was lost than `max_restarts` replaces.
        VaeInputError, CheckpointFileError: as of `WanVae.decode`; the first one that a worker raises.
    """
    check_latents(job.latents)
    decode = _Decode(pool, job, max_restarts, timeout_s)
    try:
        return decode.run(should_stop, on_tile)
    finally:
        decode.end()


class _UnderWay(NamedTuple):
    """A tile that a worker decodes."""

    number: int
    worker: WorkerHandle
    pulse: Heartbeat


class _Decode:
    """Which tiles wait, which are under way on which worker, and what is put together so far."""

    def __init__(self, pool: Pool, job: DecodeJob, max_restarts: int, timeout_s: float) -> None:
        self._pool, self._job, self._max_restarts, self._timeout_s = pool, job, max_restarts, timeout_s
        self._videos = job.latents.split(1)
        tiles = job.tiling.tiles(*job.latents.shape[3:])
        self._columns = max(tile.column for tile in tiles) + 1
        self._tiles = [(video, tile) for video in range(len(self._videos)) for tile in tiles]
        self._waiting = list(range(len(self._tiles)))
        self._done: set[int] = set()
        self._under_way: dict[Future[torch.Tensor], _UnderWay] = {}
        self._frames = empty_frames(job.latents)
        self._mosaics: dict[int, TileBlender] = {}

    def run(self, should_stop: Callable[[], bool], on_tile: Callable[[TileDone], None]) -> torch.Tensor:
        self._check_vae(should_stop)
        while len(self._done) < len(self._tiles):
            self._check_stop(should_stop)
            self._hand_out()
            ended, _ = wait(self._under_way, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                if self._take(future):
                    on_tile(TileDone(done=len(self._done), total=len(self._tiles)))
            self._look()
        return self._frames

    def end(self) -> None:
        """Nothing of this decode goes on, and no worker keeps the VAE's weights. What tiles raise now is not told."""
        if self._under_way:
            for tile in self._under_way.values():
                tile.worker.ask("stop", self._job.run_id)
            _, going_on = wait(self._under_way, timeout=self._timeout_s)
            for future in going_on:
                self._under_way[future].worker.kill()
        wait([worker.ask("free_vae") for worker in self._pool.workers], timeout=self._timeout_s)

    def _check_stop(self, should_stop: Callable[[], bool]) -> None:
        if should_stop():
            raise DecodeCancelled(f"the decode was stopped after {len(self._done)} of {len(self._tiles)} tiles")

    def _check_vae(self, should_stop: Callable[[], bool]) -> None:
        """Raise MissingPathError if a worker that answers has no VAE."""
        asked = [worker.ask("facts", [str(self._job.vae)], self._job.paths) for worker in self._pool.workers]
        until = time.monotonic() + min(self._timeout_s, FACTS_S)
        while wait(asked, timeout=LOOK_S).not_done and time.monotonic() < until:
            self._check_stop(should_stop)
        answered = [each.result() for each in asked if each.done() and each.exception() is None]
        check_paths(answered, self._job.paths)

    def _hand_out(self) -> None:
        """Give every idle worker the next tile, unless that lies too far ahead of the one that is due."""
        busy = {tile.worker.rank for tile in self._under_way.values()}
        furthest = self._due() + self._columns + EARLY_TILES * len(self._pool.workers)
        for worker in self._pool.workers:
            if worker.rank in busy or not self._waiting or self._waiting[0] > furthest:
                continue
            number = self._waiting.pop(0)
            video, tile = self._tiles[number]
            part = crop(self._videos[video], tile).contiguous()
            job = self._job
            task = DecodeTask(run_id=job.run_id, vae=job.vae, latents=part, dtype=job.dtype, paths=job.paths)
            decoding = worker.ask("decode_tile", task)
            self._under_way[decoding] = _UnderWay(number, worker, Heartbeat([worker], self._timeout_s))

    def _due(self) -> int:
        """The first tile that is not done."""
        return next(number for number in range(len(self._tiles)) if number not in self._done)

    def _take(self, future: Future[torch.Tensor]) -> bool:
        """Whether a tile is there now; where its worker was lost, there is another worker."""
        number, worker, _ = self._under_way.pop(future)
        try:
            decoded = future.result()
        except WorkerLostError as err:
            self._replace(number, worker, err)
            return False
        self._put(number, decoded)
        self._done.add(number)
        return True

    def _look(self) -> None:
        """End workers that hang in a tile."""
        for future, (number, worker, pulse) in list(self._under_way.items()):
            pulse.poll()
            limit = silence_limit(self._timeout_s, begun=pulse.begun)
            if pulse.silence_s > limit:
                worker.kill()
                del self._under_way[future]
                said = f"worker {worker.rank} began no frame for {limit:g} s and was ended\n{worker.log_tail()}"
                self._replace(number, worker, WorkerLostError(said.strip(), worker.rank))

    def _replace(self, number: int, worker: WorkerHandle, error: WorkerLostError) -> None:
        """Start another worker in the place of one that is lost with a tile, as long as losses are made good."""
        if self._max_restarts == 0:
            raise error
        self._max_restarts -= 1
        self._pool.replace(worker.rank)
        self._waiting = sorted([number, *self._waiting])

    def _put(self, number: int, decoded: torch.Tensor) -> None:
        video, tile = self._tiles[number]
        if video not in self._mosaics:
            self._mosaics[video] = TileBlender(self._job.tiling, into=self._frames[video])
        self._mosaics[video].put(tile, decoded)
