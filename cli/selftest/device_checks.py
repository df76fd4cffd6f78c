"""Device checks without a model: copies, stream order, page locks, decoding, rates, overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ...devices import DeviceRuntime, PageLockError, auto_dtype, clock_for, dtype_name, runtime_for
from ...devices.machine import available_bytes
from ...host import measure_machine
from ...offload import attach_offload, map_memory
from ...offload.probes import wrong_decodings
from ...schema import OffloadPolicy
from ...schema.text import format_rate, format_size
from ...shapes import ExpertShape, VideoShape, choose_arithmetic
from ...testing import TinyShape
from ...wan.measurement import METERED_TOKENS, BlockVariant, block_pass, measure_block, random_block
from .findings import Finding

# One byte, one byte more than a page, and a copy that takes milliseconds.
SIZES = (1, 4097, 64 * 1024**2)
"""Sizes of the checked copies, in bytes."""
ROUNDS = 20
"""Times that two streams hand the same memory to each other."""
LOCK_BYTES, LOCK_PIECE = 4 * 1024**3, 256 * 1024**2
"""RAM to page-lock in search of a limit, and the bytes per call."""
OVERLAP_BLOCKS = 4
OVERLAP_PASSES = 3
MOST_OVERLAP = 1.25
"""Streaming may take this many times as long as the longer of copying and computing. A perfect
overlap is 1."""
VIDEO = VideoShape(width=832, height=480, frames=81)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Device under test, and the sizes in the test."""

    device: torch.device
    models: Path | None
    """Folder with weights on the disk to measure."""
    tiny: TinyShape
    """Expert shape in whole runs."""
    block: ExpertShape
    """Shape of timed blocks."""
    tokens: int = 4096
    """Tokens in blocks timed next to copies."""
    video: VideoShape = VIDEO
    """Video size for the block timed alone."""
    metered_tokens: int = METERED_TOKENS
    """Tokens in the block timed in each arithmetic."""
    lock_bytes: int = LOCK_BYTES

    @cached_property
    def runtime(self) -> DeviceRuntime:
        """Runtime of the device. Devices without streams have none."""
        runtime = runtime_for(self.device)
        assert runtime is not None, f"{self.device} has no streams"
        return runtime


def check_copies(subject: Subject) -> Finding:
    """Copy random bytes to the device, on it, and back on a separate stream, and compare them."""
    runtime = subject.runtime
    stream = runtime.stream()
    wrong = list[str]()
    for nbytes in SIZES:
        expected = torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
        )
        for locked in (True, False):
            host = map_memory(nbytes)
            back = map_memory(nbytes)
            host.copy_(expected)
            first, second = (
                torch.zeros(nbytes, dtype=torch.uint8, device=subject.device) for _ in range(2)
            )
            # The zeros may still be written on the current stream.
            stream.wait_stream(runtime.current_stream())
            with (
                page_locked(runtime, host, back) if locked else ExitStack(),
                runtime.on_stream(stream),
            ):
                first.copy_(host, non_blocking=True)
                second.copy_(first, non_blocking=True)
                back.copy_(second, non_blocking=True)
                clock_for(subject.device).settle()
            if not torch.equal(back, expected):
                wrong.append(
                    f"{format_size(nbytes)} of {'page-locked' if locked else 'pageable'} RAM"
                )
    if wrong:
        return Finding.failed(f"other bytes came back: {', '.join(wrong)}")
    return Finding.passed(f"up to {format_size(max(SIZES))} there and back, equal bit for bit")


def check_streams(subject: Subject) -> Finding:
    """Hand memory from stream to stream by events while both have work, and compare all values."""
    runtime = subject.runtime
    compute = runtime.current_stream()
    copies = runtime.stream()
    busy = torch.ones(1024, 1024, device=subject.device)
    values = torch.zeros(2**20, device=subject.device)
    host = torch.zeros(ROUNDS, values.numel())
    # The zeros are written on the compute stream, so the copies must wait for them.
    copies.wait_stream(compute)
    with page_locked(runtime, host.view(-1).view(torch.uint8)):
        for number in range(ROUNDS):
            for _ in range(4):
                torch.mm(busy, busy)  # the copy must wait for this work, too
            values.fill_(number)
            filled = runtime.event()
            read = runtime.event()
            filled.record(compute)
            copies.wait_event(filled)
            with runtime.on_stream(copies):
                host[number].copy_(values, non_blocking=True)
            read.record(copies)
            # Otherwise the next fill overwrites values that are still being copied.
            compute.wait_event(read)
        clock_for(subject.device).settle()
    expected = torch.arange(ROUNDS, dtype=torch.float32)[:, None].expand_as(host)
    wrong = int((host != expected).any(1).sum())
    if wrong:
        return Finding.failed(f"{wrong} of {ROUNDS} copies did not wait for the work before them")
    return Finding.passed(f"{ROUNDS} copies between kernels, each in its order")


def check_page_locks(subject: Subject) -> Finding:
    """Page-lock RAM in pieces until the driver refuses, or enough is locked."""
    runtime = subject.runtime
    # A quarter at most, because locked pages cannot be swapped.
    wanted = min(subject.lock_bytes, available_bytes() // 4)
    locked = 0
    refused = ""
    seconds = 0.0
    with ExitStack() as held:
        while locked < wanted and not refused:
            # Zeroed first: a lock on pages without memory would time the page faults too.
            piece = map_memory(min(LOCK_PIECE, subject.lock_bytes)).zero_()
            start = time.perf_counter()
            try:
                runtime.lock_pages(piece)
            except PageLockError as err:
                refused = str(err)
            else:
                seconds += time.perf_counter() - start
                # The callback keeps the piece alive until it is unlocked.
                held.callback(runtime.unlock_pages, piece)
                locked += piece.numel()
    figures = {"locked_bytes": locked, "seconds": seconds, "refused": refused}
    if refused:
        return Finding(
            outcome="limited",
            words=f"{format_size(locked)} locked, then refused: {refused}",
            remedy=(
                "weights beyond that are copied from ordinary RAM, slower and with the host "
                "waiting: raise the limit (Linux: ulimit -l; WSL2: memory in .wslconfig; Windows "
                "locks at most about half of the RAM), or run under Linux"
            ),
            figures=figures,
        )
    words = f"{format_size(locked)} locked in {seconds:.2f} s, no limit met"
    return Finding.passed(words, **figures)


def check_decoding(subject: Subject) -> Finding:
    """Decode every stored format on the device and on the CPU, and compare the bits."""
    computed = auto_dtype(subject.device)
    wrong = wrong_decodings(subject.device, computed)
    if wrong:
        return Finding.failed(
            f"other values than on a CPU, in {dtype_name(computed)}: {', '.join(wrong)}"
        )
    return Finding.passed(f"all formats to {dtype_name(computed)}, equal to a CPU bit for bit")


def check_rates(subject: Subject) -> Finding:
    """Measure the machine as `wanstream probe` does, and store the profile for the planner."""
    profile = measure_machine(
        subject.device, expert=subject.block, tokens=subject.video.tokens, models=subject.models
    )
    machine = profile.machine
    words = [
        f"file to RAM {format_rate(machine.disk_bytes_per_s)}",
        f"decoding {format_rate(machine.decode_bytes_per_s)}",
        f"a block {machine.flops_per_s / 1e12:.2f} TFLOP/s",
    ]
    if machine.bus is not None:
        words.insert(0, f"RAM to device {format_rate(machine.bus.h2d_bytes_per_s)}")
    return Finding.passed(", ".join(words), machine=machine.to_dict(), notes=profile.notes)


def check_arithmetic(subject: Subject) -> Finding:
    """Time a block in each arithmetic and in parts, next to products and attention alone."""
    times = measure_block(subject.block, subject.metered_tokens, subject.device, most_s=0.5)
    dtype = dtype_name(auto_dtype(subject.device))
    words = [f"{name or dtype}: {each.words}" for name, each in times.items()]
    choice = choose_arithmetic(times)
    return Finding.passed(
        "; ".join([*words, choice.words]),
        tokens=subject.metered_tokens,
        arithmetic={name or dtype: each.to_dict() for name, each in times.items()},
        multiplied=choice.multiplied,
    )


def check_overlap(subject: Subject) -> Finding:
    """Time blocks that only copy, that only compute, and that do both at once."""
    value_bytes = auto_dtype(subject.device).itemsize
    needed = 3 * OVERLAP_BLOCKS * subject.block.streamed_bytes(bytes_per_weight=value_bytes)
    if needed > available_bytes():
        return Finding(
            outcome="not run",
            words=f"needs {format_size(needed)} of RAM, {format_size(available_bytes())} are "
            "available",
            remedy="close other programs",
        )
    computing = _pass_s(subject, OffloadPolicy.resident(), subject.tokens)
    # One token, so that only the copies take time.
    copying = _pass_s(subject, OffloadPolicy.layerwise(1), 1)
    both = _pass_s(subject, OffloadPolicy.layerwise(1), subject.tokens)
    ratio = both / max(computing, copying)
    figures = {"copy_s": copying, "compute_s": computing, "streamed_s": both, "ratio": ratio}
    words = (
        f"a block copies in {1e3 * copying:.1f} ms, computes {subject.tokens} tokens in "
        f"{1e3 * computing:.1f} ms, and takes {1e3 * both:.1f} ms streamed: {ratio:.2f} times the "
        "longer one"
    )
    if ratio <= MOST_OVERLAP:
        return Finding.passed(words, **figures)
    return Finding(
        outcome="limited",
        words=words,
        remedy=(
            "copies and kernels hinder each other: see the page locks, close other programs that "
            "use the GPU, and under Windows switch on hardware-accelerated GPU scheduling"
        ),
        figures=figures,
    )


@contextmanager
def page_locked(runtime: DeviceRuntime, *memories: torch.Tensor) -> Iterator[None]:
    """Page-lock 1-D uint8 memory inside the `with`, as far as the driver allows it."""
    with ExitStack() as held:
        for memory in memories:
            try:
                runtime.lock_pages(memory)
            except PageLockError:
                continue  # `check_page_locks` reports it
            held.callback(runtime.unlock_pages, memory)
        yield


def _pass_s(subject: Subject, policy: OffloadPolicy, tokens: int) -> float:
    """Return the seconds per block in passes through a few random blocks, after one to warm up."""
    device = subject.device
    clock = clock_for(subject.device)
    # In RAM in the device's dtype, so that they are copied as they are.
    stored_in = torch.device("cpu")
    dtype = auto_dtype(device)
    blocks = [
        random_block(subject.block, stored_in, BlockVariant(dtype=dtype))
        for _ in range(OVERLAP_BLOCKS)
    ]
    passes = [block_pass(block, subject.block, tokens, device) for block in blocks]
    with torch.no_grad(), attach_offload(blocks, policy=policy, device=device) as engine:
        for block in passes:
            block()
        with engine.passes(OVERLAP_PASSES):
            start = clock.mark()
            for block in passes * OVERLAP_PASSES:
                block()
            end = clock.mark()
        clock.settle()
        return clock.seconds(start, end) / (OVERLAP_PASSES * OVERLAP_BLOCKS)
