"""Measurement of the routes of weights in a worker group: over each worker's bus, or gathered from the others.

All workers of the group call it at the same point of the same run. It takes one to two seconds for any block size.
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

PROBE_BYTES = {"cuda": 128 * 1024**2, "cpu": 4 * 1024**2}
"""Largest size of the probe's block: large enough that the latency of a copy is negligible."""
REPEATS = 5
"""Number of measurements after a warm-up, of which the median is used."""


@dataclass(frozen=True, kw_only=True)
class WeightTimes:
    """Seconds of one block on the slowest worker of a group; see `WeightFigures`."""

    h2d_s: float
    h2d_concurrent_s: float
    shard_h2d_s: float
    gather_s: float
    gather_during_h2d_s: float


def probe_weights(groups: ProcessGroups, block_bytes: int) -> WeightTimes:
    """Measure with blocks of `block_bytes` stored bytes; every worker of the group returns the same figures.

    Raises WorkerTimeoutError and PeerLostError.
    """
    probe = _Probe(groups, min(block_bytes, PROBE_BYTES[groups.device.type]))
    try:
        seconds = probe.times()
    finally:
        probe.close()
    scale = block_bytes / probe.nbytes
    slowest = _slowest(groups, [scale * value for value in seconds])
    return WeightTimes(**dict(zip(WeightTimes.__dataclass_fields__, slowest, strict=True)))


class _Probe:
    """Buffers of one worker's measurements: a block on the host, and a copied and a gathered block on the device."""

    def __init__(self, groups: ProcessGroups, nbytes: int) -> None:
        self._groups, self._gather = groups, GroupGather(groups)
        device = groups.device
        self._shard = shard_bytes(nbytes, groups.size)
        self.nbytes = self._shard * groups.size
        self._clock = clock_for(device)
        self._on_gpu = device.type == "cuda"
        self._host = map_memory(self.nbytes)
        self._host.zero_()
        self._on_device = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._own_shard = torch.zeros(self._shard, dtype=torch.uint8, device=device)
        self._gathered = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._copy_stream = torch.cuda.Stream(device) if self._on_gpu else None
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
        """Return seconds in the order of the fields of `WeightTimes`."""
        alone = 0.0
        for rank in range(self._groups.size):
            self._barrier()
            if rank == self._groups.group_rank:
                alone = self._median_s(self._copy)
        self._barrier()
        concurrent = self._median_s(self._copy)
        self._barrier()
        gather = self._median_s(self._gather_once)
        self._barrier()
        shard, during = self._copy_and_gather()
        return [alone, concurrent, shard, gather, during]

    def _copy(self) -> None:
        self._on_device.copy_(self._host, non_blocking=True)

    def _copy_shard(self) -> None:
        self._on_device[: self._shard].copy_(self._host[: self._shard], non_blocking=True)

    def _gather_once(self) -> None:
        self._gather.all_gather(self._gathered, self._own_shard)

    def _copy_and_gather(self) -> tuple[float, float]:
        """Return the median seconds of copying a shard and of a gather, both at the same time.

        The number of gathers is fixed, because they are collective; copies are repeated until the gathers are done.
        """
        finished = threading.Event()
        copied: list[float] = []

        def copy_until_finished() -> None:
            with self._on_copy_stream():
                while not (copied and finished.is_set()):
                    copied.append(self._time_s(self._copy_shard))

        copying = threading.Thread(target=copy_until_finished, name="wanstream-probe", daemon=True)
        copying.start()
        try:
            gathered = self._median_s(self._gather_once)
        finally:
            finished.set()
            copying.join()
        return median(copied), gathered

    def _on_copy_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copy_stream is None else torch.cuda.stream(self._copy_stream)

    def _median_s(self, work: Callable[[], None]) -> float:
        return median([self._time_s(work) for _ in range(REPEATS + 1)][1:])

    def _time_s(self, work: Callable[[], None]) -> float:
        start = self._clock.mark()
        work()
        end = self._clock.mark()
        self._clock.settle()
        return max(self._clock.seconds(start, end), 1e-9)

    def _barrier(self) -> None:
        """Wait until all workers have finished the last measurement."""
        self._gather.compare(b"probe")


def _slowest(groups: ProcessGroups, seconds: list[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    with groups.translate_errors("compared the times of weights"):
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=groups.control)
    return [float(value) for value in slowest]
