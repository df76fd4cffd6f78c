"""The engine: executes the two programs of a run with one pool of buffers, slots of RAM, and two threads per run.

A run (`engine_run.py`) goes through the visits and fetches of the device program and the reads of the RAM program. The
engine decides nothing: it accepts only checked programs, and the run records what it really fetched and read, so that a
test can hold them against each other. Between runs it changes what is added to blocks when they arrive, takes another
size, and gives device memory back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from ..metrics import Recorder
from ..plan import BlockKey, RamHomes, Residency, RunPrograms, TransferProgram, check_program, check_ram, eviction_order
from .buffers import BlockBuffer, BufferState
from .engine_run import EngineRun
from .gather import Sharded
from .gathering import Gathering
from .layout import allocate_flat
from .page_lock import CudaPageLock
from .patches import BlockPatch, HeldPatches
from .route import Route
from .shared_segment import SharedSegment
from .source import BlockSource


class StreamEngine:
    """Buffers, slots and streams for the blocks of one source on one device; serves one run at a time.

    Args:
        source: where the stored bytes of every block come from.
        buffers: size of the pool; each buffer holds the largest block of the source in its computed form.
        homes: the blocks that stay in RAM.
        device: `cpu` or `cuda`.
        shared: RAM that the ranks of one machine hold together.
        sharded: the ranks that keep one shard of every block each; the source is then a `RangeSource`.

    Raises:
        SourceError: there is not enough RAM for the homes.
    """

    def __init__(
        self,
        source: BlockSource,
        *,
        buffers: int,
        homes: RamHomes,
        device: torch.device,
        shared: SharedSegment | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        self.device = device
        self.formats = {key: source.block_format(key) for key in source.keys()}
        lock = CudaPageLock(device) if device.type == "cuda" else None
        self._patches = HeldPatches(self.formats, lock=lock)
        self._route = Route(source, self.formats, self._patches, device=device, sharded=sharded)
        self.ram = self._route.ram_slots(lock, shared)
        self.ram.check_room(homes, self.staging)
        self.ram.resize(homes, self.staging)
        self.buffers = tuple(BlockBuffer(index) for index in range(buffers))
        self.streams = self._route.streams()
        self._running = threading.Lock()

    @property
    def staging(self) -> int:
        """Slots of RAM beside those of homes; none where bytes can be read straight into a buffer."""
        return self._route.staging

    @property
    def gathering(self) -> Gathering | None:
        """How far the ranks are that keep a shard of every block; None where every rank has whole blocks."""
        return self._route.gathering

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory that the engine takes now."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.streams.device_bytes + self.ram.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the engine keeps page-locked now."""
        return self.ram.locked_bytes + self._patches.locked_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that slots and patches take now, locked or not."""
        return self.ram.nbytes + self._patches.host_bytes

    @property
    def running(self) -> bool:
        """Whether a run is going on."""
        return self._running.locked()

    def contents(self) -> dict[int, BlockKey]:
        """What the buffers still hold from the run before; a new program may keep it."""
        return {b.index: b.key for b in self.buffers if b.state is BufferState.DONE and b.key is not None}

    def run(self, programs: RunPrograms, *, recorder: Recorder | None = None) -> EngineRun:
        """A run of `programs`; `with` starts it, and leaving it joins its threads, whatever happened.

        Raises:
            RuntimeError: another run is going on; said here, and again on entering.
            ValueError: a program is wrong, or made for more buffers or slots; the latter is said again on entering.
        """
        if self.running:
            raise RuntimeError(_BUSY)
        self.check_size(programs)
        check_program(programs.device)
        check_ram(programs.device, programs.ram)
        return EngineRun(self, programs, recorder)

    def check_size(self, programs: RunPrograms) -> None:
        """Raise ValueError for programs that need more buffers or slots than there are now."""
        for needed, there, word in (
            (programs.device.buffers, len(self.buffers), "buffers"),
            (programs.ram.program.buffers, len(self.ram), "slots of RAM"),
        ):
            if needed > there:
                raise ValueError(f"the program needs {needed} {word}, the engine has {there}: compile it again")

    def fetch_bytes(self, key: BlockKey) -> int:
        """Bytes of one fetch of a block: as it is stored, or the own shard of it, and the factors of its patch."""
        return self._route.sizes[key] + self._patches.nbytes(key)

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

    def resize(self, buffers: int, *, residency: Residency, homes: RamHomes) -> None:
        """Have that many buffers and those homes in RAM; of what lies there, the most useful is kept.

        New buffers take memory when a run first fetches into them.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
            SourceError: there is not enough RAM for the homes; nothing was touched.
        """
        self.claim()
        try:
            order = eviction_order(range(len(self.buffers)), self.contents(), residency)
            out = order[: max(0, len(order) - buffers)]
            freed = sum(self.buffers[index].nbytes for index in out) if self.device.type == "cpu" else 0
            self.ram.check_room(homes, self.staging, freed=freed)
            self.streams.settle()
            for index in out:
                _let_go(self.buffers[index])
            stay = [buffer for buffer in self.buffers if buffer.index not in out]
            self.buffers = (*stay, *(BlockBuffer(index) for index in range(len(stay), buffers)))
            for index, buffer in enumerate(self.buffers):
                buffer.index = index
            self.ram.resize(homes, self.staging)
        finally:
            self.release()

    def restore_buffers(self, program: TransferProgram) -> None:
        """Allocate the buffers that `program` fetches into and that were given back (computing thread, in a run)."""
        for index in sorted({fetch.buffer for fetch in program.fetches}):
            if self.buffers[index].state is BufferState.ABSENT:
                self.buffers[index].restore(allocate_flat(self._route.buffer_bytes, self.device))

    def take_buffers(self) -> None:
        """Allocate all buffers now, for those who reckon with their memory before a run.

        Raises:
            RuntimeError: a run is going on; nothing was touched. Or the device has no memory left.
        """
        self.claim()
        try:
            for buffer in self.buffers:
                if buffer.state is BufferState.ABSENT:
                    buffer.restore(allocate_flat(self._route.buffer_bytes, self.device))
        finally:
            self.release()

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of another meeting, which keep the same shards: those that were read stay.

        What lies in buffers goes, as a rank that came anew has nothing there.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self.claim()
        try:
            self.drop_buffers()
            self.streams.close()
            self._route.meet(sharded)
            self.streams = self._route.streams()
        finally:
            self.release()

    def drop_buffers(self) -> None:
        """Let go of what lies in buffers and of their memory (nobody may use it, in a run or not)."""
        for buffer in self.buffers:
            _let_go(buffer)

    def close(self) -> None:
        """Give device memory and RAM back, once the device has passed everything that uses them.

        Raises:
            RuntimeError: a run is going on; nothing was touched.
        """
        self.claim()
        try:
            self.streams.close()
            self.ram.close()
            self._patches.replace({})
            self.drop_buffers()
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
