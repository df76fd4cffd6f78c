"""Tile size of a shared decode: from the worker with the least memory, and smaller after an out-of-memory error."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

import torch

from ...devices import is_out_of_memory
from ...wan import DecodeNeeds, Tiling, TilingError, shared_tiling, with_smaller_tiles
from ..messages import WorkerFacts
from ..transport.pool import Pool, WorkerLostError
from .decode import FACTS_TIMEOUT_S, POLL_S, DecodeJob, TileDone, decode_on_workers


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
        VaeRoomError: the worker with the least memory has too little for the smallest tile.
        TilingError: no worker reported its memory in time.
    """
    facts = _facts(pool, check)
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
    `decode_on_workers` and `with_smaller_tiles`.
    """

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than a tiling are a tiling too"
        retry = replace(job, tiling=tiling, run_id=uuid.uuid4().hex)
        return decode_on_workers(
            pool, retry, max_restarts=max_restarts, timeout_s=timeout_s, should_stop=should_stop, on_tile=on_tile
        )

    return with_smaller_tiles(attempt, needs, job.tiling, on_change, is_short=_is_short)


def _is_short(error: RuntimeError) -> bool:
    """Return True if a worker reported that it ran out of memory; the log in a WorkerLostError does not count."""
    return not isinstance(error, WorkerLostError) and is_out_of_memory(error)


def _facts(pool: Pool, check: Callable[[], None]) -> list[WorkerFacts]:
    """Return the facts of the workers that respond in time."""
    requests = [worker.ask("facts") for worker in pool.workers]
    until = time.monotonic() + FACTS_TIMEOUT_S
    while wait(requests, timeout=POLL_S).not_done and time.monotonic() < until:
        check()
    return [each.result() for each in requests if each.done() and each.exception() is None]


def _on_cpu(facts: WorkerFacts) -> bool:
    return facts.device == "cpu"


def _decode_budgets(facts: list[WorkerFacts]) -> list[int]:
    """Return the memory of each worker for a decode: all of a GPU, a share of the RAM of its machine."""
    workers_on = Counter(each.machine for each in facts if _on_cpu(each))
    return [each.tile_bytes // (workers_on[each.machine] if _on_cpu(each) else 1) for each in facts]
