"""Probes of this machine: rates of disk, bus, RAM, decoding and quantising, and whether a device decodes exactly.

Each takes seconds and a few hundred MB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ..devices import PageLockError, clock_for, runtime_for
from .engine.threads import torch_thread_pool
from .formats.decode import FP8_DTYPES, decode_tensor
from .formats.layout import host_bytes
from .formats.packing import MXFP8, NVFP4, QUANT_FORMATS, EightBit, Packing
from .formats.quantise import FP8, quantise_rows, work_memory
from .host_memory.pages import map_memory
from .sources.quantised import MAX_THREADS
from .sources.read_plan import ALIGNMENT, O_DIRECT, ReadPiece
from .sources.reader import FileReader

PIECE_BYTES = 128 * 1024**2
"""Bytes that are read, copied or page-locked at once; a probe allocates at most two such pieces of RAM."""
SIDE = 2048
"""Side length of the square matrices that are decoded and quantised."""


@dataclass(frozen=True, kw_only=True)
class DiskRate:
    """Read rate of one file; `how` describes the route, and whether the page cache may have been warm."""

    bytes_per_s: float
    bytes_read: int
    how: str


class CopyRate(NamedTuple):
    """Bytes per second of a copy between RAM and a GPU."""

    idle: float
    busy: float
    """The rate while the GPU computes."""


@dataclass(frozen=True, kw_only=True)
class BusRates:
    """Rates between RAM and a GPU."""

    h2d: CopyRate
    h2d_pageable: CopyRate
    d2h: CopyRate
    d2h_pageable: CopyRate
    locked: bool
    """False if the system refuses to lock pages; all rates are then those of pageable memory."""

    def words(self) -> str:
        """Return a description of all eight rates."""
        routes = {
            "to the GPU, pinned": self.h2d,
            "to the GPU, pageable": self.h2d_pageable,
            "from the GPU, pinned": self.d2h,
            "from the GPU, pageable": self.d2h_pageable,
        }
        return "; ".join(
            f"{route} {rate.idle / 1e9:.1f} GB/s, {rate.busy / 1e9:.1f} while it computes"
            for route, rate in routes.items()
        )


def probe_disk(
    path: Path, *, max_bytes: int = 2_000_000_000, max_s: float = 1.5, directly: bool | None = None
) -> DiskRate:
    """Read `path` from its start like a file of blocks, until `max_bytes` or `max_s` are reached.

    With `directly` None, reads bypass the page cache if the file system allows it. Otherwise the cached pages of this
    file are dropped first, which needs no permission. If the system drops none, the rate may be that of a warm file,
    and `how` says so.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    size = min(path.stat().st_size, max_bytes)
    if not size:
        raise ValueError(f"{path} is empty: give a file of weights to read")
    if directly is None:
        directly = _reads_directly(path)
    how = "bypassing the page cache" if directly else _drop_cached(path)
    memory = map_memory(min(size, PIECE_BYTES))
    reader = FileReader(direct=directly)
    try:
        start, done = time.perf_counter(), 0
        while done == 0 or (done < size and time.perf_counter() - start < max_s):
            count = min(memory.numel(), size - done)
            reader.read(_pieces(path, done, count, host_bytes(memory).data))
            done += count
        return DiskRate(bytes_per_s=done / (time.perf_counter() - start), bytes_read=done, how=how)
    finally:
        reader.close()


def probe_bus(device: torch.device, *, compute: Callable[[], None]) -> BusRates:
    """Measure copies between RAM and the GPU `device`, idle and while it runs the kernels that `compute` launches."""
    host, pageable = map_memory(PIECE_BYTES), torch.empty(PIECE_BYTES, dtype=torch.uint8)
    # Touch all pages first, so that no page fault is measured.
    host.zero_()
    pageable.zero_()
    on_device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
    runtime, locked = runtime_for(device), True
    assert runtime is not None, f"{device} has no bus"
    stream = runtime.stream()
    stream.wait_stream(runtime.current_stream())  # earlier work there may still use the memory
    try:
        runtime.lock_pages(host)
    except PageLockError:
        locked = False

    def rate(target: torch.Tensor, source: torch.Tensor) -> CopyRate:
        copy, on_copies = partial(target.copy_, source, non_blocking=True), partial(runtime.on_stream, stream)
        idle, busy = (
            typical_s(copy, device, repeats=5, on_stream=on_copies, meanwhile=meanwhile)
            for meanwhile in (None, compute)
        )
        return CopyRate(idle=PIECE_BYTES / idle, busy=PIECE_BYTES / busy)

    try:
        return BusRates(
            h2d=rate(on_device, host),
            h2d_pageable=rate(on_device, pageable),
            d2h=rate(host, on_device),
            d2h_pageable=rate(pageable, on_device),
            locked=locked,
        )
    finally:
        clock_for(device).settle()
        if locked:
            runtime.unlock_pages(host)


def probe_copy() -> float:
    """Return the bytes per second of a torch copy from RAM to RAM."""
    source, target = (torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    return PIECE_BYTES / typical_s(lambda: target.copy_(source), torch.device("cpu"))


def probe_decode(device: torch.device) -> float:
    """Return the bf16 bytes per second of decoding fp8 with one scale per row on `device`."""
    stored = torch.zeros(SIDE, SIDE, device=device).to(FP8)
    into = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    scale = torch.ones(SIDE, 1, device=device)
    return into.nbytes / typical_s(lambda: decode_tensor(stored, into, scale=scale), device)


def wrong_decodings(device: torch.device, computed: torch.dtype) -> tuple[str, ...]:
    """Return the names of the stored formats that `device` decodes to other values of `computed` than the CPU."""
    random = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    scales = {"one scale": torch.tensor(0.0123), "a scale per row": torch.rand(64, 1, generator=random) + 0.01}
    cases: dict[str, tuple[torch.Tensor, Packing | None, torch.Tensor | None, tuple[int, ...]]] = {
        f"{str(dtype).removeprefix('torch.')} with {words}": (codes.view(dtype), None, scale, tuple(codes.shape))
        for dtype in FP8_DTYPES
        for words, scale in scales.items()
    }
    for name, packing in QUANT_FORMATS.items():
        groups = torch.randint(0, 256, (256, packing.nbytes), dtype=torch.uint8, generator=random)
        cases[name] = groups, packing, None, (256, packing.values)
    rows = scales["a scale per row"].view(-1).view(torch.uint8)
    for int8 in (EightBit(), EightBit(group=256)):
        cases[int8.name] = torch.cat((codes.view(-1), rows)), int8, None, tuple(codes.shape)
    for micro in (MXFP8, NVFP4):
        matrix = torch.randint(0, 256, (micro.code_bytes((64, 256)),), dtype=torch.uint8, generator=random)
        groups = torch.randint(100, 120, micro.scale_shape((64, 256)), dtype=torch.uint8, generator=random)
        cases[micro.name] = torch.cat((matrix, groups.view(-1))), micro, None, (64, 256)

    def decoded(place: torch.device, case: str) -> torch.Tensor:
        stored, packing, scale, shape = cases[case]
        into = torch.empty(shape, dtype=computed, device=place)
        decode_tensor(stored.to(place), into, packing=packing, scale=None if scale is None else scale.to(place))
        return into.cpu().nan_to_num(7.0)

    cpu = torch.device("cpu")
    return tuple(case for case in cases if not torch.equal(decoded(cpu, case), decoded(device, case)))


def probe_quantise() -> float:
    """Return the bf16 bytes per second that all threads of a quantised source together convert to fp8."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    values = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    into, scales = torch.empty(SIDE, SIDE, dtype=FP8), torch.empty(SIDE, 1)
    rows = [range(part * SIDE // threads, (part + 1) * SIDE // threads) for part in range(threads)]
    work = [work_memory(SIDE) for _ in rows]

    def quantise(part: int) -> None:
        part_rows = slice(rows[part].start, rows[part].stop)
        quantise_rows(values[part_rows], into[part_rows], scales[part_rows], work[part])

    with torch_thread_pool(threads, "wanstream-probe") as pool:

        def all_parts() -> None:
            jobs = [pool.submit(quantise, part) for part in range(threads)]
            wait(jobs)
            for job in jobs:
                job.result()

        return values.nbytes / typical_s(all_parts, torch.device("cpu"))


def typical_s(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 3,
    on_stream: Callable[[], AbstractContextManager[object]] = nullcontext,
    meanwhile: Callable[[], None] | None = None,
) -> float:
    """Return the median seconds of a few calls of `work` on `device` after a warm-up call.

    Args:
        on_stream: context that issues `work` to another stream than the current one.
        meanwhile: called before each call, to keep the current stream busy.
    """
    clock, times = clock_for(device), []
    for _ in range(repeats + 1):
        if meanwhile is not None:
            meanwhile()
        with on_stream():
            start = clock.mark()
            work()
            end = clock.mark()
            clock.settle()
        times.append(clock.seconds(start, end))
    clock.settle()  # the kernels of `meanwhile` must not slow down the next measurement
    return median(times[1:])


def _pieces(path: Path, start: int, nbytes: int, memory: memoryview) -> list[tuple[ReadPiece, memoryview]]:
    step = 8 * 1024**2
    return [
        (ReadPiece(path=path, offset=start + at, nbytes=min(step, nbytes - at), target=at, names=("probe",)), memory)
        for at in range(0, nbytes, step)
    ]


def _reads_directly(path: Path) -> bool:
    """Return True if the file system of `path` supports direct reads, which bypass the page cache."""
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
    """Drop the cached pages of one file if the system allows it; return a description of the result."""
    if not hasattr(os, "posix_fadvise"):
        return "through the page cache, maybe warm: this system cannot drop cached pages"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as err:
        return f"through the page cache, maybe warm: its pages cannot be dropped ({err.strerror})"
    finally:
        os.close(descriptor)
    return "through the page cache, after dropping its pages"
