"""Probes for this machine: rates of disk, bus, RAM, decoding and quantising, and exact decoding.

Each takes seconds and a few hundred MB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ...devices import PageLockError, clock_for, dtype_name, runtime_for
from ..core.pages import host_bytes, map_memory
from ..core.threads import torch_thread_pool
from ..formats.decode import FP8_DTYPES, decode_tensor
from ..formats.packing import MXFP8, NVFP4, QUANT_FORMATS, EightBit, Packing
from ..formats.quantise import FP8, quantise_rows, work_memory
from ..sources.quantised import MAX_THREADS
from ..sources.read_plan import ALIGNMENT, O_DIRECT, PIECE_BYTES, ReadPiece
from ..sources.reader import FileReader, OpenFiles

PROBED_BYTES = 128 * 1024**2
"""Bytes read, copied or page-locked at once. A probe allocates at most two such pieces in RAM."""
SIDE = 2048
"""Side length of the square matrices for decoding and quantising."""


@dataclass(frozen=True, kw_only=True)
class DiskRate:
    """Read rate for one file.

    `how` describes the route, and whether the page cache may have been warm.
    """

    bytes_per_s: float
    bytes_read: int
    how: str


class CopyRate(NamedTuple):
    """Bytes per second in a copy between RAM and a GPU."""

    idle: float
    busy: float
    """Rate while the GPU computes."""


@dataclass(frozen=True, kw_only=True)
class BusRates:
    """Rates between RAM and a GPU."""

    h2d: CopyRate
    h2d_pageable: CopyRate
    d2h: CopyRate
    d2h_pageable: CopyRate
    locked: bool
    """False if the system refuses to lock pages. All rates are then for pageable memory."""

    def words(self) -> str:
        """Describe all eight rates."""
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


def probe_disk(path: Path, *, max_bytes: int = 2_000_000_000, max_s: float = 1.5) -> DiskRate:
    """Read `path` from the start like a block file, until `max_bytes` or `max_s` are reached.

    Reads bypass the page cache if the file system allows it. Otherwise this file's cached pages are
    dropped first, which needs no permission. If the system drops none, the rate may be for a warm
    file, and `how` says so.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    size = min(path.stat().st_size, max_bytes)
    if not size:
        raise ValueError(f"{path} is empty: give a file of weights to read")
    directly = _reads_directly(path)
    how = "bypassing the page cache" if directly else _drop_cached(path)
    memory = map_memory(min(size, PROBED_BYTES))
    with closing(FileReader(direct=directly)) as reader:
        start = time.perf_counter()
        done = 0
        while done == 0 or (done < size and time.perf_counter() - start < max_s):
            count = min(memory.numel(), size - done)
            reader.read(_pieces(path, done, count, host_bytes(memory).data))
            done += count
        return DiskRate(bytes_per_s=done / (time.perf_counter() - start), bytes_read=done, how=how)


def probe_bus(device: torch.device, *, compute: Callable[[], None]) -> BusRates:
    """Measure copies between RAM and the GPU `device`, idle and while it runs `compute`."""
    host = map_memory(PROBED_BYTES)
    pageable = torch.empty(PROBED_BYTES, dtype=torch.uint8)
    # Touch all pages first, so no page fault is measured.
    host.zero_()
    pageable.zero_()
    on_device = torch.empty(PROBED_BYTES, dtype=torch.uint8, device=device)
    runtime = runtime_for(device)
    locked = True
    assert runtime is not None, f"{device} has no bus"
    stream = runtime.stream()
    stream.wait_stream(runtime.current_stream())  # earlier work there may still use the memory
    try:
        runtime.lock_pages(host)
    except PageLockError:
        locked = False

    def rate(target: torch.Tensor, source: torch.Tensor) -> CopyRate:
        copy = partial(target.copy_, source, non_blocking=True)
        on_copies = partial(runtime.on_stream, stream)
        idle, busy = (
            typical_s(copy, device, repeats=5, on_stream=on_copies, meanwhile=meanwhile)
            for meanwhile in (None, compute)
        )
        return CopyRate(idle=PROBED_BYTES / idle, busy=PROBED_BYTES / busy)

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
    """Return the bytes per second in a torch copy from RAM to RAM."""
    source, target = (torch.zeros(PROBED_BYTES, dtype=torch.uint8) for _ in range(2))
    return PROBED_BYTES / typical_s(lambda: target.copy_(source), torch.device("cpu"))


def probe_decode(device: torch.device) -> float:
    """Return the rate of decoding fp8 with row scales on `device`, in bf16 bytes per second."""
    stored = torch.zeros(SIDE, SIDE, device=device).to(FP8)
    into = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    scale = torch.ones(SIDE, 1, device=device)
    return into.nbytes / typical_s(lambda: decode_tensor(stored, into, scale=scale), device)


def wrong_decodings(device: torch.device, computed: torch.dtype) -> tuple[str, ...]:
    """Return the stored formats with other `computed` values on `device` than on the CPU."""
    random = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    scales = {
        "one scale": torch.tensor(0.0123),
        "a scale per row": torch.rand(64, 1, generator=random) + 0.01,
    }
    cases: dict[str, tuple[torch.Tensor, Packing | None, torch.Tensor | None, tuple[int, ...]]] = {}
    for dtype in FP8_DTYPES:
        for words, scale in scales.items():
            cases[f"{dtype_name(dtype)} with {words}"] = codes.view(dtype), None, scale, codes.shape
    random_bytes = partial(torch.randint, dtype=torch.uint8, generator=random)
    for name, packing in QUANT_FORMATS.items():
        groups = random_bytes(0, 256, (256, packing.nbytes))
        cases[name] = groups, packing, None, (256, packing.values)
    rows = scales["a scale per row"].view(-1).view(torch.uint8)
    for int8 in (EightBit(), EightBit(group=256)):
        cases[int8.name] = torch.cat((codes.view(-1), rows)), int8, None, codes.shape
    for micro in (MXFP8, NVFP4):
        matrix = random_bytes(0, 256, (micro.code_bytes((64, 256)),))
        groups = random_bytes(100, 120, micro.scale_shape((64, 256)))
        cases[micro.name] = torch.cat((matrix, groups.view(-1))), micro, None, (64, 256)

    def decoded(place: torch.device, case: str) -> torch.Tensor:
        stored, packing, scale, shape = cases[case]
        into = torch.empty(shape, dtype=computed, device=place)
        moved = None if scale is None else scale.to(place)
        decode_tensor(stored.to(place), into, packing=packing, scale=moved)
        # NaN is not equal to itself, and both devices must have it at the same places.
        return into.cpu().nan_to_num(7.0)

    cpu = torch.device("cpu")
    return tuple(
        case for case in cases if not torch.equal(decoded(cpu, case), decoded(device, case))
    )


def probe_quantise() -> float:
    """Return a quantised source's fp8 rate with all threads, in bf16 bytes per second."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    values = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    into = torch.empty(SIDE, SIDE, dtype=FP8)
    scales = torch.empty(SIDE, 1)
    work = [work_memory(SIDE) for _ in range(threads)]
    parts = (values.chunk(threads), into.chunk(threads), scales.chunk(threads), work)
    with torch_thread_pool(threads, "wanstream-probe") as pool:

        def all_parts() -> None:
            list(pool.map(quantise_rows, *parts))

        return values.nbytes / typical_s(all_parts, torch.device("cpu"))


def typical_s(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 3,
    on_stream: Callable[[], AbstractContextManager[object]] = nullcontext,
    meanwhile: Callable[[], None] | None = None,
) -> float:
    """Return the median seconds over a few calls of `work` on `device` after a warm-up call.

    Args:
        on_stream: context that issues `work` to another stream than the current one.
        meanwhile: called before each call, to keep the current stream busy.
    """
    clock = clock_for(device)
    times = []
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


def _pieces(
    path: Path, start: int, nbytes: int, memory: memoryview
) -> list[tuple[ReadPiece, memoryview]]:
    pieces = []
    for at in range(0, nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, nbytes - at)
        piece = ReadPiece(path=path, offset=start + at, nbytes=count, target=at, names=("probe",))
        pieces.append((piece, memory))
    return pieces


def _reads_directly(path: Path) -> bool:
    """Return True if the file system under `path` supports direct reads, past the page cache."""
    if not O_DIRECT:
        return False
    with suppress(OSError), closing(OpenFiles(O_DIRECT)) as files:
        return files.read_at(path, 0, host_bytes(map_memory(ALIGNMENT)).data) > 0
    return False


def _drop_cached(path: Path) -> str:
    """Drop one file's cached pages if the system allows it.

    Return a description of the result.
    """
    if not hasattr(os, "posix_fadvise"):
        return "through the page cache, maybe warm: this system cannot drop cached pages"
    with path.open("rb") as file:
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as err:
            why = err.strerror
            return f"through the page cache, maybe warm: its pages cannot be dropped ({why})"
    return "through the page cache, after dropping its pages"
