"""VAE decoding on all workers: the size of shared tiles, and their distribution.

The result is bit-equal to that of one worker with the same tiles. A worker holds one tile at a time. The driver holds
the frames, one row of tiles, and a few tiles that arrived early.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import torch

from ...plan import Assignment, GroupId
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
from ..transport.threads import run_in_thread
from .heartbeat import Heartbeat
from .stage_run import POLL_S, GroupEnd, GroupEvent, StageRun, StepTaken

FACTS_TIMEOUT_S = 30.0
"""Time for workers to report whether they have the VAE; of a slower worker, a missing VAE fails the first tile."""
EARLY_TILES = 2
"""Tiles per worker that may be decoded ahead of the next one to be blended, until which they stay in RAM."""


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

    Workers that are lost before are replaced first and not counted. When memory runs out, the decode starts again with
    smaller tiles. Each try counts its tiles and losses from 0. A worker that begins no frame for longer than its
    heartbeat's limit counts as lost; one that does not stop within `timeout_s` is killed. The others decode while it is
    replaced; at the end, or after a cancel, a try waits up to `timeout_s` for that, because the pool is not usable yet.

    Args:
        ref: how long workers may be silent, how many losses of each are survived, and where their files are.
        task: videos [B, C, T, h, w] of either latent space of Wan; a worker gets one tile of them at a time.
        check: called often on this thread; may raise to cancel, after which the workers are stopped too.
        on_tile: called on this thread with the number of decoded tiles and of all tiles.
        on_change: called with the change before every retry.

    Raises:
        MissingPathError: the VAE is missing on the machine of a worker; the message names it.
        RestartLimitError: more than `max_restarts` losses of a worker within an hour; the message has the last one.
        VaeInputError, CheckpointFileError: as `WanVae.decode`; the first error of a worker.
        DecodeOutOfMemoryError: a worker has too little memory for the smallest tiles.
        ValueError, OSError: a lost worker cannot be replaced; as the constructor of the pool.
    """
    check_latents(task.latents)
    check_paths(_facts(pool, check, min(ref.timeout_s, FACTS_TIMEOUT_S), [str(task.vae)], ref.paths), ref.paths)

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than a tiling are a tiling too"
        tiles = list(itertools.product(range(len(task.latents)), tiling.tiles(*task.latents.shape[3:])))
        latents = [crop(task.latents[video : video + 1], tile) for video, tile in tiles]
        run_task = replace(task, run_id=uuid.uuid4().hex, paths=ref.paths)
        groups = {GroupId(rank, 0): TileGroup(pool, rank, run_task, ref.timeout_s) for rank in range(len(pool.workers))}
        frames, done = empty_frames(task.latents), itertools.count(1)
        blenders = [TileBlender(tiling, into=each) for each in frames]

        def blend(number: int, step: StepTaken[torch.Tensor]) -> None:
            video, tile = tiles[number]
            blenders[video].put(tile, step.report)
            on_tile(next(done), len(tiles))

        ahead = max(tile.column for _, tile in tiles) + 1 + EARLY_TILES * len(groups)
        run = StageRun([[range(1)]] * len(tiles), groups, latents, max_restarts=ref.max_restarts, ahead=ahead)
        try:
            run.run(blend, check)
        finally:
            # A replacement that fails here costs no frame; the next run starts another pool.
            wait([group.repairing for group in groups.values() if group.repairing is not None], timeout=ref.timeout_s)
            wait([worker.call("free_vae") for worker in pool.workers], timeout=ref.timeout_s)
        return frames

    return retry_with_smaller_tiles(attempt, needs, tiling, on_change)


class TileGroup:
    """Worker that decodes one tile at a time; implements `StageGroup`. An item is a tile with one step.

    Its state is the latents, before and after the step. The frames are the report of the step, because a run keeps the
    states of all items.
    """

    def __init__(self, pool: Pool, rank: int, task: DecodeTask, timeout_s: float) -> None:
        self._pool, self._rank, self._task, self._timeout_s = pool, rank, task, timeout_s
        self._worker = pool.workers[rank]
        self._heartbeat = Heartbeat([self._worker], timeout_s)
        self._decoding: Future[torch.Tensor] | None = None
        self.repairing: Future[WorkerHandle] | None = None
        self._deadline_s = math.inf
        """Time after which a stopped worker is killed."""

    def start(self, assignment: Assignment, state: torch.Tensor | None, wake: threading.Event) -> None:
        """See `StageGroup.start`."""
        assert state is not None, "the state of a tile is its latents"
        # Cloned, because a pickled view would carry the latents of all videos to the worker.
        self._task = replace(self._task, latents=state.clone(memory_format=torch.contiguous_format))
        self._worker = self._pool.workers[self._rank]
        self._heartbeat = Heartbeat([self._worker], self._timeout_s)
        self._decoding = self._worker.call("decode_tile", self._task)
        self._decoding.add_done_callback(lambda _: wake.set())

    def poll(self) -> list[GroupEvent[torch.Tensor]]:
        """See `StageGroup.poll`. Kills a worker that hangs in a tile or does not stop in time."""
        job: Future[Any] | None = self._decoding or self.repairing
        if job is None:
            return []
        if job.done():
            error = job.exception()
        elif time.monotonic() > self._deadline_s:
            error = self._kill(f"did not stop within {self._timeout_s:g} s")
        elif self._decoding is not None and self._heartbeat.is_overdue():
            error = self._kill(f"began no frame for {self._heartbeat.limit_s:g} s")
        else:
            return []
        is_decoded = self._decoding is not None and error is None
        steps = [StepTaken(next_step=1, state=self._task.latents, report=job.result())] if is_decoded else []
        self._decoding = self.repairing = None
        is_loss = isinstance(error, WorkerLostError)
        return [*steps, GroupEnd(error=error, can_resume=is_loss, counts_as_failure=is_loss)]

    def stop(self) -> None:
        """See `StageGroup.stop`. The worker stops before its next frame."""
        self._worker.call("stop", self._task.run_id)
        self._deadline_s = time.monotonic() + self._timeout_s

    def repair(self, wake: threading.Event) -> None:
        """See `StageGroup.repair`."""
        self.repairing = run_in_thread("wanstream-replace", self._pool.replace, self._rank)
        self.repairing.add_done_callback(lambda _: wake.set())

    def _kill(self, reason: str) -> WorkerLostError:
        self._worker.kill()
        message = f"worker {self._rank} {reason} and was killed\n{self._worker.log_tail()}"
        return WorkerLostError(message.strip(), self._rank)


def tiles_by_memory(
    pool: Pool,
    needs: DecodeNeeds,
    *,
    weight_bytes: int,
    memory_bytes: int,
    videos: int,
    check: Callable[[], None] = lambda: None,
) -> Tiling:
    """Return the tiling in which all workers of `pool` can decode, after lost ones are replaced.

    Args:
        needs: memory needs of the whole decode.
        weight_bytes: bytes of the VAE, which every worker loads.
        memory_bytes: limit per worker in addition to the weights; 0: its free memory.
        check: called while the workers report their memory; may raise to cancel.

    Raises:
        VaeMemoryError: the worker with the least memory has too little for the smallest tile.
        TilingError: no worker reported its memory in time.
        ValueError, OSError: a lost worker cannot be replaced; as the constructor of the pool.
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


def _facts(pool: Pool, check: Callable[[], None], limit_s: float, *args: Any) -> list[WorkerFacts]:
    """Replace lost workers, and return the facts of those that respond in time; `args` are those of `Worker.facts`."""
    answers = _answers([worker.call("facts", *args) for worker in pool.workers], check, limit_s)
    lost = [err.rank for each in answers if isinstance(err := each.exception(), WorkerLostError)]
    if lost:
        # Before the first tile, so that workers that died between two decodes do not count as losses of this one.
        for repair in _answers([run_in_thread("wanstream-replace", replace_lost, pool, lost)], check, math.inf):
            repair.result()
        answers = _answers([worker.call("facts", *args) for worker in pool.workers], check, limit_s)
    return [each.result() for each in answers if each.exception() is None]


def _answers(requests: list[Future[Any]], check: Callable[[], None], limit_s: float) -> list[Future[Any]]:
    """Return those of the requests that are done in time, after errors too."""
    until = time.monotonic() + limit_s
    while wait(requests, timeout=POLL_S).not_done and time.monotonic() < until:
        check()
    return [each for each in requests if each.done()]


def _on_cpu(facts: WorkerFacts) -> bool:
    return facts.device == "cpu"


def _decode_budgets(facts: list[WorkerFacts]) -> list[int]:
    """Return the memory of each worker for a decode: all of a GPU, a share of the RAM of its machine."""
    workers_on = Counter(each.machine for each in facts if _on_cpu(each))
    return [each.tile_bytes // (workers_on[each.machine] if _on_cpu(each) else 1) for each in facts]
