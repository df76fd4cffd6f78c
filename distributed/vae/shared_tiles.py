"""How large tiles are that workers share: by the memory of the one that has least, and smaller where it runs out."""

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
from .decode import FACTS_S, LOOK_S, DecodeJob, TileDone, decode_on_workers


def tiles_by_memory(
    pool: Pool,
    needs: DecodeNeeds,
    *,
    weight_bytes: int,
    memory_bytes: int,
    videos: int,
    check: Callable[[], None] = lambda: None,
) -> Tiling:
    """The tiles in which the workers of `pool` can decode together.

    Args:
        needs: of the whole decode.
        weight_bytes: of the VAE, which each of them holds.
        memory_bytes: what each may take beside them; 0 for what it has.
        check: called while they are asked; ends the asking by raising.

    Raises:
        VaeRoomError: the worker that has least has too little for the smallest tile.
        TilingError: none has told what it has.
    """
    facts = _facts(pool, check)
    if not facts:
        raise TilingError(f"no worker has told its memory within {FACTS_S:g} s: set tile_size, for example to 256")
    room = max(0, min(_rooms(facts)) - weight_bytes)
    return shared_tiling(
        needs,
        min(room, memory_bytes) if memory_bytes else room,
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
    """`decode_on_workers`, and again in smaller tiles where a worker has no memory for one, as `with_smaller_tiles`.

    Each try has a run id of its own, counts its tiles anew and makes good as many losses. Raises as both of them do.
    """

    def attempt(tiling: Tiling | None) -> torch.Tensor:
        assert tiling is not None, "smaller tiles than some are tiles"
        again = replace(job, tiling=tiling, run_id=uuid.uuid4().hex)
        return decode_on_workers(
            pool, again, max_restarts=max_restarts, timeout_s=timeout_s, should_stop=should_stop, on_tile=on_tile
        )

    return with_smaller_tiles(attempt, needs, job.tiling, on_change, is_short=_is_short)


def _is_short(error: RuntimeError) -> bool:
    """Whether a worker has run out of memory and told it; one that is lost may have it in the end of its log."""
    return not isinstance(error, WorkerLostError) and is_out_of_memory(error)


def _facts(pool: Pool, check: Callable[[], None]) -> list[WorkerFacts]:
    """Of those workers that tell them in time."""
    asked = [worker.ask("facts") for worker in pool.workers]
    until = time.monotonic() + FACTS_S
    while wait(asked, timeout=LOOK_S).not_done and time.monotonic() < until:
        check()
    return [each.result() for each in asked if each.done() and each.exception() is None]


def _on_cpu(facts: WorkerFacts) -> bool:
    return facts.device == "cpu"


def _rooms(facts: list[WorkerFacts]) -> list[int]:
    """What each may take: of a GPU all, of RAM its part."""
    sharing = Counter(each.machine for each in facts if _on_cpu(each))
    return [each.tile_bytes // (sharing[each.machine] if _on_cpu(each) else 1) for each in facts]
