"""The engine: executes a `TransferProgram` with one pool of buffers and one fetch thread per run.

A run (`engine_run.py`) goes through the program's visits and fetches. The engine decides nothing: it accepts only a
checked program, and the run records what it really fetched, so that a test can hold the two against each other. Between
runs it changes what is added to blocks when they arrive, and gives device memory back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from ..metrics import Recorder
from ..plan import BlockKey, Residency, TransferProgram, check_program, eviction_order
from .buffers import BlockBuffer, BufferState
from .cpu_streams import CpuStreams
from .cuda_streams import CudaStreams
from .engine_run import EngineRun
from .layout import allocate_flat
from .page_lock import CudaPageLock
from .patches import BlockPatch, HeldPatches
from .source import BlockSource
from .streams import Streams

STAGING_SLOTS = 2  # facts of the simulator: two whole-block slots keep a disk busy, a third gains nothing


class StreamEngine:
    """Buffers and streams for the blocks of one source on one device; serves one run at a time.

    Args:
        source: where the stored bytes of every block come from.
        buffers: size of the pool; each buffer holds the largest block of the source in its computed form.
        device: `cpu` or `cuda`.
    """

    def __init__(self, source: BlockSource, *, buffers: int, device: torch.device) -> None:
        self.device = device
        self.formats = {key: source.block_format(key) for key in source.keys()}
        self._largest = max(fmt.computed.nbytes for fmt in self.formats.values())
        self.buffers = tuple(BlockBuffer(index, allocate_flat(self._largest, device)) for index in range(buffers))
        on_cuda = device.type == "cuda"
        self._patches = HeldPatches(self.formats, lock=CudaPageLock(device) if on_cuda else None)
        self.streams: Streams
        if on_cuda:
            self.streams = CudaStreams(source, self.formats, self._patches, slots=STAGING_SLOTS, device=device)
        else:
            self.streams = CpuStreams(source, self.formats, self._patches, slots=STAGING_SLOTS)
        self._running = threading.Lock()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the engine takes now."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.streams.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the engine keeps page-locked now, beside those of its source."""
        return self.streams.pinned_bytes + self._patches.locked_bytes

    @property
    def running(self) -> bool:
        """Whether a run is going on."""
        return self._running.locked()

    def contents(self) -> dict[int, BlockKey]:
        """What the buffers still hold from the run before; a new program may keep it."""
        return {b.index: b.key for b in self.buffers if b.state is BufferState.DONE and b.key is not None}

    def run(self, program: TransferProgram, *, recorder: Recorder | None = None) -> EngineRun:
        """A run of `program`; `with` starts it, and leaving it joins the fetch thread, whatever happened.

        Raises:
            RuntimeError: another run is going on; said here, and again on entering.
            ValueError: the program is wrong, or made for more buffers.
        """
        if self.running:
            raise RuntimeError(_BUSY)
        if program.buffers > len(self.buffers):
            raise ValueError(f"the program needs {program.buffers} buffers, the engine has {len(self.buffers)}")
        check_program(program)
        return EngineRun(self, program, recorder)

    def fetch_bytes(self, key: BlockKey) -> int:
        """Bytes of one fetch of a block: as it is stored, and the factors of its patch."""
        return self.formats[key].stored.nbytes + self._patches.nbytes(key)

    def set_patches(self, patches: Mapping[BlockKey, BlockPatch]) -> None:
        """Replace all patches. Blocks that arrived with another patch, or without theirs, are fetched again.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
            ValueError: a patch does not fit its block; the patches are as they were.
            OSError: the system does not give that much memory; the patches are as they were.
        """
        self.claim()
        try:
            prepared = self._patches.prepare(patches)
            changed = self._patches.changed(prepared)
            if changed:
                self.streams.settle()
                for index, key in self.contents().items():
                    if key in changed:
                        self.buffers[index].forget()
                self._patches.replace(prepared)
        finally:
            self.release()

    def give_back(self, nbytes: int, *, residency: Residency) -> int:
        """Free whole buffers, the least useful first, until `nbytes` are free or nothing is left; returns bytes freed.

        What else lies on the device goes last. The next run allocates and fetches what it misses.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self.claim()
        try:
            self.streams.settle()
            freed = 0
            for index in eviction_order(range(len(self.buffers)), self.contents(), residency):
                if freed >= nbytes:
                    return freed
                freed += _let_go(self.buffers[index])
            return freed if freed >= nbytes else freed + self.streams.give_back()
        finally:
            self.release()

    def restore_buffers(self, program: TransferProgram) -> None:
        """Allocate the buffers that `program` fetches into and that were given back (computing thread, in a run)."""
        for index in sorted({fetch.buffer for fetch in program.fetches}):
            if self.buffers[index].state is BufferState.ABSENT:
                self.buffers[index].restore(allocate_flat(self._largest, self.device))

    def close(self) -> None:
        """Give the device memory back, once the device has passed everything that uses it.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self.claim()
        try:
            self.streams.close()
            self._patches.replace({})
            for buffer in self.buffers:
                _let_go(buffer)
            self.buffers = ()
        finally:
            self.release()

    def claim(self) -> None:
        """Nobody else may run or close the engine until `release`; raises RuntimeError if somebody does."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(_BUSY)

    def release(self) -> None:
        """The engine may run again."""
        self._running.release()


_BUSY = "this engine is already running a program; wait for that run to end"


def _let_go(buffer: BlockBuffer) -> int:
    """Free the memory of one buffer, whatever it holds between runs; returns its bytes."""
    if buffer.state is BufferState.ABSENT:
        return 0
    if buffer.state is BufferState.DONE:
        buffer.forget()
    return buffer.give_back()
