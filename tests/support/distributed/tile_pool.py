"""Workers on threads in this process, to decode tiles.

Each may be delayed or fail before a tile.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from wanstream.distributed.messages import DecodeTask, WorkerFacts
from wanstream.distributed.worker.worker import TileDecoder, Worker
from wanstream.schema.refs import PathMap

FACTS = Worker("cpu")
Before = Callable[["ThreadWorker", DecodeTask], None]


class ThreadWorker:
    """Worker on a thread. `before` may delay a tile, or raise instead."""

    def __init__(self, rank: int, before: Before) -> None:
        self.rank = rank
        self.killed = False
        self.freed = 0
        self.tiles = self.given = self.begun = 0
        self.hangs = False
        self.missing: tuple[str, ...] = ()
        self._before = before
        self._decoder = TileDecoder(torch.device("cpu"))
        self.stopped: set[str] = set()
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method == "decode_tile":
            self.given += 1
            return self._thread.submit(self._decode, *args)
        answer: Future[Any] = Future()
        answer.set_result(getattr(self, f"_{method}")(*args))
        return answer

    def _stop(self, run_id: str) -> None:
        self.stopped.add(run_id)

    def _free_vae(self) -> None:
        self.freed += 1
        self._decoder.free()

    def _blocks_begun(self) -> int:
        self.begun += not self.hangs
        return self.begun

    def _facts(self, paths: Sequence[str], maps: Sequence[PathMap]) -> WorkerFacts:
        facts = FACTS.facts(paths, maps)
        sizes = {**facts.sizes, **dict.fromkeys(self.missing)}
        return replace(facts, node=f"node-{self.rank}", sizes=sizes)

    def _decode(self, task: DecodeTask) -> torch.Tensor:
        self._before(self, task)
        decoded = self._decoder.decode(task, lambda: task.run_id in self.stopped)
        self.tiles += 1
        return decoded

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        self.killed = True

    def end(self) -> None:
        self._thread.shutdown()


class ThreadPool:
    """Workers on threads. A lost one is replaced by one that loses nothing."""

    def __init__(self, count: int, before: Before) -> None:
        self.workers = [ThreadWorker(rank, before) for rank in range(count)]
        self.all = list(self.workers)

    def replace(self, rank: int) -> ThreadWorker:
        self.workers[rank] = ThreadWorker(rank, lambda worker, task: None)
        self.all.append(self.workers[rank])
        return self.workers[rank]

    def close(self) -> None:
        for worker in self.all:
            worker.end()
