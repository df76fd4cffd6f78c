"""Checks of a device without a model: copies, the order of streams, page locks, decoding, rates, overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ...devices import DeviceRuntime, PageLockError, auto_dtype, available_bytes, clock_for, dtype_name, runtime_for
from ...host import measure_machine
from ...offload import attach_offload, map_memory, wrong_decodings
from ...plan import choose_arithmetic
from ...schema import ExpertShape, OffloadPolicy, VideoShape, format_rate, format_size
from ...testing import TinyShape
from ...wan import METERED_TOKENS, BlockVariant, block_pass, measure_block, random_block
from .findings import Finding

SIZES = (1, 4097, 64 * 1024**2)
"""Bytes of the checked copies."""
ROUNDS = 20
"""Times that two streams hand the same memory to each other."""
LOCK_BYTES, LOCK_PIECE = 4 * 1024**3, 256 * 1024**2
"""RAM that is page-locked to find a limit, and the bytes of each call."""
OVERLAP_BLOCKS, OVERLAP_PASSES = 4, 3
MOST_OVERLAP = 1.25
"""Streaming may take this many times as long as the longer of copying and computing; a perfect overlap is 1."""
VIDEO = VideoShape(width=832, height=480, frames=81)
IN_RAM = Finding(outcome="not needed", words="this device computes in RAM, without streams")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Device under test, and the sizes of its test."""

    device: torch.device
    models: Path | None
    """Folder of weights on the disk to measure."""
    tiny: TinyShape
    """Shape of the experts of whole runs."""
    block: ExpertShape
    """Shape of the blocks that are timed."""
    tokens: int = 4096
    """Tokens of the blocks that are timed next to copies."""
    video: VideoShape = VIDEO
    """Size of the video whose block is timed alone."""
    metered_tokens: int = METERED_TOKENS
    """Tokens of the block that is timed in each arithmetic."""
    lock_bytes: int = LOCK_BYTES

    @cached_property
    def runtime(self) -> DeviceRuntime | None:
        """Runtime of the device; None on a CPU."""
        return runtime_for(self.device)


def check_copies(subject: Subject) -> Finding:
    """Copy random bytes to the device, on it, and back on a stream of their own, and compare them."""
    runtime = subject.runtime
    if runtime is None:
        return IN_RAM
    stream, wrong = runtime.stream(), list[str]()
    for nbytes in SIZES:
        expected = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
        for locked in (True, False):
            host, back = map_memory(nbytes), map_memory(nbytes)
            host.copy_(expected)
            first, second = (torch.zeros(nbytes, dtype=torch.uint8, device=subject.device) for _ in range(2))
            stream.wait_stream(runtime.current_stream())
            with page_locked(runtime, host, back) if locked else ExitStack(), runtime.on_stream(stream):
                first.copy_(host, non_blocking=True)
                second.copy_(first, non_blocking=True)
                back.copy_(second, non_blocking=True)
                clock_for(subject.device).settle()
            if not torch.equal(back, expected):
                wrong.append(f"{format_size(nbytes)} of {'page-locked' if locked else 'pageable'} RAM")
    if wrong:
        return Finding(outcome="failed", words=f"other bytes came back: {', '.join(wrong)}")
    return Finding(outcome="passed", words=f"up to {format_size(max(SIZES))} there and back, equal bit for bit")


def check_streams(subject: Subject) -> Finding:
    """Hand memory from stream to stream by events, while both have work, and compare every value."""
    runtime = subject.runtime
    if runtime is None:
        return IN_RAM
    compute, copies = runtime.current_stream(), runtime.stream()
    busy = torch.ones(1024, 1024, device=subject.device)
    values = torch.zeros(2**20, device=subject.device)
    host = torch.zeros(ROUNDS, values.numel())
    copies.wait_stream(compute)
    with page_locked(runtime, host.view(-1).view(torch.uint8)):
        for number in range(ROUNDS):
            for _ in range(4):
                torch.mm(busy, busy)  # the copy must wait for this work, too
            values.fill_(number)
            filled, read = runtime.event(), runtime.event()
            filled.record(compute)
            copies.wait_event(filled)
            with runtime.on_stream(copies):
                host[number].copy_(values, non_blocking=True)
            read.record(copies)
            compute.wait_event(read)
        clock_for(subject.device).settle()
    expected = torch.arange(ROUNDS, dtype=torch.float32)[:, None].expand_as(host)
    wrong = int((host != expected).any(1).sum())
    if wrong:
        return Finding(outcome="failed", words=f"{wrong} of {ROUNDS} copies did not wait for the work before them")
    return Finding(outcome="passed", words=f"{ROUNDS} copies between kernels, each in its order")


def check_page_locks(subject: Subject) -> Finding:
    """Page-lock RAM in pieces until the driver refuses, or enough is locked."""
    runtime = subject.runtime
    if runtime is None:
        return IN_RAM
    wanted = min(subject.lock_bytes, available_bytes() // 4)
    locked, refused, seconds = 0, "", 0.0
    with ExitStack() as held:
        while locked < wanted and not refused:
            piece = map_memory(min(LOCK_PIECE, subject.lock_bytes)).zero_()
            start = time.perf_counter()
            try:
                runtime.lock_pages(piece)
            except PageLockError as err:
                refused = str(err)
            else:
                seconds += time.perf_counter() - start
                held.callback(runtime.unlock_pages, piece)
                locked += piece.numel()
    figures = {"locked_bytes": locked, "seconds": seconds, "refused": refused}
    if refused:
        return Finding(
            outcome="limited",
            words=f"{format_size(locked)} locked, then refused: {refused}",
            remedy=(
                "weights beyond that are copied from ordinary RAM, slower and with the host waiting: raise the limit "
                "(Linux: ulimit -l; WSL2: memory in .wslconfig; Windows locks at most about half of the RAM), or run "
                "under Linux"
            ),
            figures=figures,
        )
    words = f"{format_size(locked)} locked in {seconds:.2f} s, no limit met"
    return Finding(outcome="passed", words=words, figures=figures)


def check_decoding(subject: Subject) -> Finding:
    """Decode every stored format on the device and on the CPU, and compare the bits."""
    if subject.runtime is None:
        return IN_RAM
    computed = auto_dtype(subject.device)
    wrong = wrong_decodings(subject.device, computed)
    if wrong:
        return Finding(
            outcome="failed", words=f"other values than on a CPU, in {dtype_name(computed)}: {', '.join(wrong)}"
        )
    return Finding(
        outcome="passed",
        words=f"all formats to {dtype_name(computed)}, equal to a CPU bit for bit",
    )


def check_rates(subject: Subject) -> Finding:
    """Measure the machine as `wanstream probe` does, and store its profile for the planner."""
    profile = measure_machine(subject.device, expert=subject.block, tokens=subject.video.tokens, models=subject.models)
    machine = profile.machine
    rates = {
        "RAM to device": machine.h2d_bytes_per_s,
        "file to RAM": machine.disk_bytes_per_s,
        "decoding": machine.decode_bytes_per_s,
    }
    words = [f"{name} {format_rate(rate)}" for name, rate in rates.items() if rate is not None]
    words.append(f"a block {machine.flops_per_s / 1e12:.2f} TFLOP/s")
    figures = {"machine": machine.to_dict(), "notes": profile.notes}
    return Finding(outcome="passed", words=", ".join(words), figures=figures)


def check_arithmetic(subject: Subject) -> Finding:
    """Time a block in each arithmetic and in parts, next to products and attention alone; on a GPU only."""
    if subject.runtime is None:
        return Finding(outcome="not needed", words="a CPU decodes 8-bit matrices")
    times = measure_block(subject.block, subject.metered_tokens, subject.device, most_s=0.5)
    dtype = dtype_name(auto_dtype(subject.device))
    words = [f"{name or dtype}: {each.words}" for name, each in times.items()]
    choice = choose_arithmetic(times)
    figures = {
        "tokens": subject.metered_tokens,
        "arithmetic": {name or dtype: each.to_dict() for name, each in times.items()},
        "multiplied": choice.multiplied,
    }
    return Finding(outcome="passed", words="; ".join([*words, choice.words]), figures=figures)


def check_overlap(subject: Subject) -> Finding:
    """Time blocks that only copy, that only compute, and that do both at once."""
    if subject.runtime is None:
        return IN_RAM
    needed = 3 * OVERLAP_BLOCKS * subject.block.streamed_bytes(bytes_per_weight=auto_dtype(subject.device).itemsize)
    if needed > available_bytes():
        return Finding(
            outcome="not run",
            words=f"needs {format_size(needed)} of RAM, {format_size(available_bytes())} are available",
            remedy="close other programs",
        )
    computing = _pass_s(subject, OffloadPolicy.resident(), subject.tokens)
    copying = _pass_s(subject, OffloadPolicy.layerwise(1), 1)
    both = _pass_s(subject, OffloadPolicy.layerwise(1), subject.tokens)
    ratio = both / max(computing, copying)
    figures = {"copy_s": copying, "compute_s": computing, "streamed_s": both, "ratio": ratio}
    words = (
        f"a block copies in {1e3 * copying:.1f} ms, computes {subject.tokens} tokens in {1e3 * computing:.1f} ms, and "
        f"takes {1e3 * both:.1f} ms streamed: {ratio:.2f} times the longer one"
    )
    if ratio <= MOST_OVERLAP:
        return Finding(outcome="passed", words=words, figures=figures)
    return Finding(
        outcome="limited",
        words=words,
        remedy=(
            "copies and kernels hinder each other: see the page locks, close other programs that use the GPU, and "
            "under Windows switch on hardware-accelerated GPU scheduling"
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
    """Return the seconds per block of passes through a few random blocks, after one to warm up."""
    device, clock = subject.device, clock_for(subject.device)
    # In RAM in the dtype of the device, so that they are copied as they are.
    stored_in, dtype = torch.device("cpu"), auto_dtype(device)
    blocks = [random_block(subject.block, stored_in, BlockVariant(dtype=dtype)) for _ in range(OVERLAP_BLOCKS)]
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
