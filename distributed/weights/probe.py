"""Measures between the workers of a group how weights come fastest: over the own bus, or from each other.

All workers of the group call it at the same point of the same run; it takes a second or two, however large the blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ...devices import clock_for
from ...offload import CudaPageLock, PageLockError, map_memory, shard_bytes
from ..worker.groups import ProcessGroups
from .gather import GroupGather

PIECE_BYTES = {"cuda": 128 * 1024**2, "cpu": 4 * 1024**2}
"""Of what stands for a block: large enough that starting a copy does not count."""
REPEATS = 5
"""Of every measurement but the first, which warms up; the median counts."""


@dataclass(frozen=True, kw_only=True)
class WeightTimes:
    """Seconds of one block, of the slowest worker of a group; see `WeightFigures`."""

    h2d_s: float
    h2d_together_s: float
    shard_h2d_s: float
    gather_s: float
    gather_beside_h2d_s: float


def probe_weights(groups: ProcessGroups, block_bytes: int) -> WeightTimes:
    """Measure for blocks of `block_bytes` stored bytes. The same figures for every worker of the group.

    Raises HungError and PeerLostError, as everything that workers do together.
    """
    probe = _Probe(groups, min(block_bytes, PIECE_BYTES[groups.device.type]))
    try:
        own = probe.times()
    finally:
        probe.close()
    scale = block_bytes / probe.nbytes
    every = _slowest(groups, [scale * seconds for seconds in own])
    return WeightTimes(**dict(zip(WeightTimes.__dataclass_fields__, every, strict=True)))


class _Probe:
    """The memory of one worker's measurements: a block on the host, the same and a gathered one on the device."""

    def __init__(self, groups: ProcessGroups, nbytes: int) -> None:
        self._groups, self._gather = groups, GroupGather(groups)
        device = groups.device
        self._shard = shard_bytes(nbytes, groups.size)
        self.nbytes = self._shard * groups.size
        self._clock = clock_for(device)
        self._on_gpu = device.type == "cuda"
        self._host = map_memory(self.nbytes)
        self._host.zero_()
        self._there = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._own = torch.zeros(self._shard, dtype=torch.uint8, device=device)
        self._into = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device) if self._on_gpu else None
        self._lock: CudaPageLock | None = CudaPageLock(device) if self._on_gpu else None
        try:
            if self._lock is not None:
                self._lock.lock(self._host)
        except PageLockError:
            self._lock = None

    def close(self) -> None:
        self._clock.settle()
        if self._lock is not None:
            self._lock.unlock(self._host)

    def times(self) -> list[float]:
        """In the order of `WeightTimes`."""
        alone = 0.0
        for rank in range(self._groups.size):
            self._meet()
            if rank == self._groups.place:
                alone = self._typical(self._copy)
        self._meet()
        together = self._typical(self._copy)
        self._meet()
        gather = self._typical(self._gather_once)
        self._meet()
        shard, beside = self._side_by_side()
        return [alone, together, shard, gather, beside]

    def _copy(self) -> None:
        self._there.copy_(self._host, non_blocking=True)

    def _copy_shard(self) -> None:
        self._there[: self._shard].copy_(self._host[: self._shard], non_blocking=True)

    def _gather_once(self) -> None:
        self._gather.all_gather(self._into, self._own)

    def _side_by_side(self) -> tuple[float, float]:
        """Copying shards, and gathering beside it; as many gathers on every worker, and copies until they are done."""
        over = threading.Event()
        copied: list[float] = []

        def copy_on() -> None:
            with self._on_copies():
                while not (copied and over.is_set()):
                    copied.append(self._once(self._copy_shard))

        copying = threading.Thread(target=copy_on, name="wanstream-probe", daemon=True)
        copying.start()
        try:
            gathered = self._typical(self._gather_once)
        finally:
            over.set()
            copying.join()
        return median(copied), gathered

    def _on_copies(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def _typical(self, work: Callable[[], None]) -> float:
        return median([self._once(work) for _ in range(REPEATS + 1)][1:])

    def _once(self, work: Callable[[], None]) -> float:
        start = self._clock.mark()
        work()
        end = self._clock.mark()
        self._clock.settle()
        return max(self._clock.seconds(start, end), 1e-9)

    def _meet(self) -> None:
        """Nobody begins the next measurement before all have ended the one before."""
        self._gather.compare(b"probe")


def _slowest(groups: ProcessGroups, seconds: list[float]) -> list[float]:
    own = torch.tensor(seconds, dtype=torch.float64)
    with groups.watched("compared what weights cost"):
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=groups.control)
    return [float(value) for value in own]
