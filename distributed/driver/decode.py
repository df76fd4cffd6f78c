"""VAE decoding on all workers: tile size and tile distribution.

The result is bit-equal to a decode on one worker with the same tiles. A worker holds one tile at a
time. The driver holds the frames, one tile row, and a few early tiles.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import count, product
from typing import Any

import torch

from ...schema.refs import WorkersRef
from ...wan.vae import (
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
from ..messages import DecodeTask, StepReport, WorkerFacts
from ..path_map import check_paths
from ..plan.jobs import Assignment, GroupId
from ..transport.pool import Pool, WorkerHandle, WorkerLostError, replace_lost
from ..transport.threads import run_in_thread, wait_polling
from .heartbeat import Heartbeat
from .stage_run import CallEnd, Inbox, JobEnd, JobEvent, Repair, StageRun, report_end

FACTS_TIMEOUT_S = 30.0
"""Time for workers to report whether they have the VAE. On a slower worker, a missing VAE fails
the first tile."""
EARLY_TILES = 2
"""Tiles per worker to decode ahead of the next one to blend. They wait in RAM."""


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
    """Decode all videos in `task` -> frames [B, 4(T - 1) + 1, H, W, 3] in 0..1, fp32 on the CPU.

    Workers lost before the call are replaced first and not counted. When memory runs out, the
    decode starts again with smaller tiles. Each try counts tiles and losses from 0. A worker counts
    as lost if it begins no frame within the heartbeat limit, and is killed if it does not stop
    within `timeout_s`. The other workers decode during a replacement. After the last tile or a
    cancel, a try waits up to `timeout_s` for replacements, because the pool is not usable before.

    Args:
        ref: timeout, restarts per worker, and path maps.
        task: videos [B, C, T, h, w] in either Wan latent space. A worker gets one tile at a time.
        check: called often on this thread. It may raise to cancel, and the workers are stopped
            then.
        on_tile: called on this thread with the tiles decoded so far and the total.
        on_change: called with the change before every retry.

    Raises:
        MissingPathError: a machine lacks the VAE; the message names it.
        RestartLimitError: a worker was lost more than `max_restarts` times within an hour; the
            message has the last loss.
        VaeInputError, CheckpointFileError: as `WanVae.decode`; the first error from a worker.
        DecodeOutOfMemoryError: a worker has too little memory for the smallest tiles.
        ValueError, OSError: a lost worker cannot be replaced, as in the pool's constructor.
    """
    check_latents(task.latents)
    limit_s = min(ref.timeout_s, FACTS_TIMEOUT_S)
    check_paths(_facts(pool, check, limit_s, [str(task.vae)], ref.paths), ref.paths)

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than a tiling are a tiling too"
        return _decode_tiles(pool, ref, replace(task, paths=ref.paths), tiling, check, on_tile)

    return retry_with_smaller_tiles(attempt, needs, tiling, on_change)


def _decode_tiles(
    pool: Pool,
    ref: WorkersRef,
    task: DecodeTask,
    tiling: Tiling,
    check: Callable[[], None],
    on_tile: Callable[[int, int], None],
) -> torch.Tensor:
    """Decode and blend the tiles of all videos. Raises as `decode_in_shared_tiles`."""
    # Row by row, video after video, as the blenders take them.
    tiles = list(product(range(len(task.latents)), tiling.tiles(*task.latents.shape[3:])))
    tasks = [
        replace(task, latents=crop(task.latents[video : video + 1], tile)) for video, tile in tiles
    ]
    groups = {
        GroupId(worker.rank, 0): TileGroup(pool, worker.rank, tasks, ref.timeout_s)
        for worker in pool.workers
    }
    frames = empty_frames(task.latents)
    blenders = [TileBlender(tiling, into=each) for each in frames]
    done = count(1)

    def blend(number: int, decoded: torch.Tensor) -> None:
        video, tile = tiles[number]
        blenders[video].put(tile, decoded)
        on_tile(next(done), len(tiles))

    # Bounds the RAM for early tiles: one row, and a few per worker.
    ahead = max(tile.column for _, tile in tiles) + 1 + EARLY_TILES * len(groups)
    # Each tile is an item with one stage, and the stage has one step.
    run = StageRun([[range(1)]] * len(tiles), groups, max_restarts=ref.max_restarts, ahead=ahead)
    try:
        run.run(blend, check)
    finally:
        # A failed replacement costs no frame here. The next run starts another pool.
        repairs = [repair.future for group in groups.values() for repair in group.repairs]
        wait(repairs, timeout=ref.timeout_s)
        # Also after an error: the VAE weights would stay on the devices.
        wait([worker.call("free_vae") for worker in pool.workers], timeout=ref.timeout_s)
    return frames


class TileGroup:
    """Worker that decodes one tile at a time; implements `StageGroup`.

    An item is a tile with one step.

    Args:
        tasks: one task per tile.
    """

    def __init__(
        self, pool: Pool, rank: int, tasks: Sequence[DecodeTask], timeout_s: float
    ) -> None:
        self._pool = pool
        self._rank = rank
        self._tasks = tasks
        self._timeout_s = timeout_s
        self.repairs: list[Repair] = []

    def start(self, assignment: Assignment, inbox: Inbox) -> TileJob:
        """See `StageGroup.start`."""
        task = self._tasks[assignment.item]
        # Cloned, because a pickled view carries the storage for all videos to the worker.
        latents = task.latents.clone(memory_format=torch.contiguous_format)
        task = replace(task, run_id=uuid.uuid4().hex, latents=latents)
        return TileJob(self._pool.workers[self._rank], task, self._timeout_s, inbox)

    def repair(self, inbox: Inbox) -> Repair:
        """See `StageGroup.repair`."""
        self.repairs.append(Repair(inbox, self._pool.replace, self._rank))
        return self.repairs[-1]


class TileJob:
    """Decode task for one tile on one worker, sent at creation; implements `Job`.

    Reports the frames.
    """

    def __init__(
        self, worker: WorkerHandle, task: DecodeTask, timeout_s: float, inbox: Inbox
    ) -> None:
        self.run_id = task.run_id
        self._worker = worker
        self._timeout_s = timeout_s
        self._heartbeat = Heartbeat([worker], timeout_s)
        self._deadline_s = math.inf
        """Time limit for a stopped worker, which is killed afterwards."""
        report_end(worker.call("decode_tile", task), inbox, self.run_id)

    def receive(self, message: StepReport | CallEnd) -> JobEvent:
        """See `Job.receive`."""
        assert isinstance(message, CallEnd), "a worker reports no steps of a tile"
        error = message.future.exception()
        if error is not None:
            return JobEvent(end=JobEnd.of(error))
        return JobEvent(report=message.future.result(), next_step=1, end=JobEnd())

    def check_time(self) -> JobEvent | None:
        """See `Job.check_time`. Kills a worker that hangs in a tile or does not stop in time."""
        if time.monotonic() > self._deadline_s:
            return self._killed(f"did not stop within {self._timeout_s:g} s")
        if self._heartbeat.is_overdue():
            return self._killed(f"began no frame for {self._heartbeat.limit_s:g} s")
        return None

    def stop(self) -> None:
        """See `Job.stop`. The worker stops before its next frame."""
        self._worker.call("stop", self.run_id)
        self._deadline_s = time.monotonic() + self._timeout_s

    def _killed(self, reason: str) -> JobEvent:
        self._worker.kill()
        rank = self._worker.rank
        message = f"worker {rank} {reason} and was killed\n{self._worker.log_tail()}"
        return JobEvent(end=JobEnd.of(WorkerLostError(message.strip(), rank)))


def tiles_by_memory(
    pool: Pool,
    needs: DecodeNeeds,
    *,
    weight_bytes: int,
    memory_bytes: int,
    videos: int,
    check: Callable[[], None] = lambda: None,
) -> Tiling:
    """Return a tiling for which all workers in `pool` have the memory.

    Lost workers are replaced first.

    Args:
        needs: memory needs for the whole decode.
        weight_bytes: VAE weights in bytes, loaded by every worker.
        memory_bytes: limit per worker in addition to the weights; 0: the free memory.
        check: called while the workers report their memory. It may raise to cancel.

    Raises:
        VaeMemoryError: the worker with the least memory has too little for the smallest tile.
        TilingError: no worker reported free memory in time.
        ValueError, OSError: a lost worker cannot be replaced, as in the pool's constructor.
    """
    facts = _facts(pool, check, FACTS_TIMEOUT_S)
    if not facts:
        raise TilingError(
            f"no worker reported its free memory within {FACTS_TIMEOUT_S:g} s: set tile_size, for "
            "example to 256"
        )
    # Every worker decodes tiles of one size, so the one with the least memory decides.
    free = max(0, min(_decode_budgets(facts)) - weight_bytes)
    return shared_tiling(
        needs,
        min(free, memory_bytes) if memory_bytes else free,
        shared=any(_on_cpu(each) for each in facts),
        workers=len(pool.workers),
        videos=videos,
    )


def _facts(pool: Pool, check: Callable[[], None], limit_s: float, *args: Any) -> list[WorkerFacts]:
    """Replace lost workers, and return the facts of all workers that respond in time.

    `args` are passed to `Worker.facts`.
    """

    def answers() -> list[Future[WorkerFacts]]:
        calls = [worker.call("facts", *args) for worker in pool.workers]
        return wait_polling(calls, check, limit_s)

    answered = answers()
    lost = [err.rank for each in answered if isinstance(err := each.exception(), WorkerLostError)]
    if lost:
        # Before the first tile: workers that died between two decodes are no losses of this one.
        replacing = run_in_thread("wanstream-replace", replace_lost, pool, lost)
        # Not `result` alone: `check` may cancel a start that takes minutes.
        wait_polling([replacing], check)
        replacing.result()
        answered = answers()
    return [each.result() for each in answered if each.exception() is None]


def _on_cpu(facts: WorkerFacts) -> bool:
    return facts.device == "cpu"


def _decode_budgets(facts: list[WorkerFacts]) -> list[int]:
    """Return each worker's memory for a decode: a whole GPU, or a share of the machine's RAM."""
    sharing = Counter(each.machine for each in facts if _on_cpu(each))
    gpus = [each.tile_bytes for each in facts if not _on_cpu(each)]
    return gpus + [each.tile_bytes // sharing[each.machine] for each in facts if _on_cpu(each)]
