"""Measures what moves weights on this machine: files, bus, RAM, decoding. Seconds at most, in a few hundred MB."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ..devices import clock_for
from .engine.threads import one_thread_pool
from .formats.decode import decode_tensor
from .formats.fp8 import QUANTISED_DTYPE, quantise_rows, work_memory
from .formats.layout import host_bytes
from .host_memory.page_lock import CudaPageLock, PageLockError
from .host_memory.pages import map_memory
from .sources.direct_read import ALIGNMENT, O_DIRECT
from .sources.pieces import ReadPiece
from .sources.quantised import MOST_THREADS
from .sources.reader import FileReader

PIECE_BYTES = 128 * 1024**2
"""Read, copied or locked at once; a probe takes two of them at most."""
SIDE = 2048
"""Of the square matrices that are decoded and quantised."""


@dataclass(frozen=True, kw_only=True)
class DiskRate:
    """Bytes per second of reading one file, and in words whether that was cold."""

    bytes_per_s: float
    bytes_read: int
    how: str


@dataclass(frozen=True, kw_only=True)
class BusRates:
    """Bytes per second between RAM and a GPU; `busy` ones are measured while the GPU computes."""

    h2d: float
    h2d_busy: float
    h2d_pageable: float
    h2d_pageable_busy: float
    d2h: float
    d2h_busy: float
    d2h_pageable: float
    d2h_pageable_busy: float
    locked: bool
    """False: the system refuses to lock pages, so all figures are of ordinary memory."""

    def words(self) -> str:
        """All eight, way by way, for people."""
        ways = (
            ("to the GPU, locked", self.h2d, self.h2d_busy),
            ("to the GPU, ordinary", self.h2d_pageable, self.h2d_pageable_busy),
            ("from the GPU, locked", self.d2h, self.d2h_busy),
            ("from the GPU, ordinary", self.d2h_pageable, self.d2h_pageable_busy),
        )
        return "; ".join(f"{way} {free / 1e9:.1f} GB/s, {busy / 1e9:.1f} while it computes" for way, free, busy in ways)


def probe_disk(
    path: Path, *, max_bytes: int = 2_000_000_000, max_s: float = 1.5, directly: bool | None = None
) -> DiskRate:
    """Read `path` as blocks are read from it, from its start, until `max_bytes` or `max_s` are reached.

    Past the page cache where the file system lets us (`directly` None), or not at all. Else the pages of this file are
    dropped first, for which no permission is needed; where the system drops none the rate may be that of a warm file,
    and `how` says so. Raises OSError when the file cannot be read, and ValueError when it is empty.
    """
    size = min(path.stat().st_size, max_bytes)
    if not size:
        raise ValueError(f"{path} is empty: give a file of weights to read")
    if directly is None:
        directly = _reads_directly(path)
    how = "past the page cache" if directly else _drop_cached(path)
    memory = map_memory(min(size, PIECE_BYTES))
    reader = FileReader(direct=directly)
    try:
        begun, done = time.perf_counter(), 0
        while done == 0 or (done < size and time.perf_counter() - begun < max_s):
            count = min(memory.numel(), size - done)
            reader.read(_pieces(path, done, count, host_bytes(memory).data))
            done += count
        return DiskRate(bytes_per_s=done / (time.perf_counter() - begun), bytes_read=done, how=how)
    finally:
        reader.close()


def probe_bus(device: torch.device, *, compute: Callable[[], None]) -> BusRates:
    """Copy between RAM and the GPU `device`, alone and while it does what `compute` launches."""
    host, ordinary = map_memory(PIECE_BYTES), torch.empty(PIECE_BYTES, dtype=torch.uint8)
    host.zero_()
    ordinary.zero_()
    there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
    lock, locked = CudaPageLock(device), True
    try:
        lock.lock(host)
    except PageLockError:
        locked = False
    try:
        alone = _Copies(device, lambda: None)
        busy = _Copies(device, compute)
        return BusRates(
            h2d=alone.rate(there, host),
            h2d_busy=busy.rate(there, host),
            h2d_pageable=alone.rate(there, ordinary),
            h2d_pageable_busy=busy.rate(there, ordinary),
            d2h=alone.rate(host, there),
            d2h_busy=busy.rate(host, there),
            d2h_pageable=alone.rate(ordinary, there),
            d2h_pageable_busy=busy.rate(ordinary, there),
            locked=locked,
        )
    finally:
        clock_for(device).settle()
        if locked:
            lock.unlock(host)


def probe_copy() -> float:
    """Bytes per second from RAM to RAM, as torch copies."""
    source, target = (torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    return PIECE_BYTES / _typical_s(lambda: target.copy_(source), torch.device("cpu"))


def probe_decode(device: torch.device) -> float:
    """Computed bytes per second of decoding fp8 with a scale for each row to bf16 on `device`."""
    stored = torch.zeros(SIDE, SIDE, device=device).to(QUANTISED_DTYPE)
    into = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    scale = torch.ones(SIDE, 1, device=device)
    return into.nbytes / _typical_s(lambda: decode_tensor(stored, into, scale=scale), device)


def probe_quantise() -> float:
    """bf16 bytes per second that the threads of a quantised source turn into fp8 together."""
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    values = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    into, scales = torch.empty(SIDE, SIDE, dtype=QUANTISED_DTYPE), torch.empty(SIDE, 1)
    rows = [range(part * SIDE // threads, (part + 1) * SIDE // threads) for part in range(threads)]
    work = [work_memory(SIDE) for _ in rows]

    def quantise(part: int) -> None:
        mine = slice(rows[part].start, rows[part].stop)
        quantise_rows(values[mine], into[mine], scales[mine], work[part])

    with one_thread_pool(threads, "wanstream-probe") as pool:

        def all_parts() -> None:
            jobs = [pool.submit(quantise, part) for part in range(threads)]
            wait(jobs)
            for job in jobs:
                job.result()

        return values.nbytes / _typical_s(all_parts, torch.device("cpu"))


class _Copies:
    """Times copies on a stream of their own, beside what computes on the current one."""

    def __init__(self, device: torch.device, compute: Callable[[], None]) -> None:
        self._device = device
        self._clock = clock_for(device)
        self._stream = torch.cuda.Stream(device)
        self._compute = compute

    def rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        """Bytes per second, the median of a few copies; the first is left out."""
        times = []
        for _ in range(6):
            self._compute()
            with torch.cuda.stream(self._stream):
                start = self._clock.mark()
                target.copy_(source, non_blocking=True)
                end = self._clock.mark()
                self._clock.settle()
            times.append(self._clock.seconds(start, end))
        self._clock.settle()
        return source.numel() / median(times[1:])


def _typical_s(work: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """Seconds that `work` takes on `device`, the median of a few; the first is left out."""
    clock = clock_for(device)
    times = []
    for _ in range(repeats + 1):
        start = clock.mark()
        work()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(start, end))
    return median(times[1:])


def _pieces(path: Path, start: int, nbytes: int, memory: memoryview) -> list[tuple[ReadPiece, memoryview]]:
    step = 8 * 1024**2
    return [
        (ReadPiece(path=path, offset=start + at, nbytes=min(step, nbytes - at), target=at, names=("probe",)), memory)
        for at in range(0, nbytes, step)
    ]


def _reads_directly(path: Path) -> bool:
    """Whether the file system of `path` lets us read past the page cache."""
    if not O_DIRECT:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return False
    try:
        with suppress(OSError):
            return os.preadv(descriptor, [host_bytes(map_memory(ALIGNMENT)).data], 0) > 0
        return False
    finally:
        os.close(descriptor)


def _drop_cached(path: Path) -> str:
    """Ask the system to forget the pages of one file; what came of it, in words."""
    if not hasattr(os, "posix_fadvise"):
        return "through the page cache, maybe warm: this system drops no pages"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as err:
        return f"through the page cache, maybe warm: its pages are not dropped ({err.strerror})"
    finally:
        os.close(descriptor)
    return "through the page cache, its pages dropped before"
