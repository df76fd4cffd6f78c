"""Pool of the attached blocks: their buffers on the device, RAM slots, patches and transfer backend.

A run reserves the pool with `claim`. All changes of memory, patches, policy and group happen between runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ...devices import runtime_for
from ...plan import BlockKey, RamResidency, RunPrograms, TransferProgram, eviction_order, plan_ram
from ...schema import OffloadPolicy, Residency, plan_residency
from ..formats.layout import allocate_flat
from ..host_memory.shared_segment import SharedSegment
from ..patches import BlockPatch, StagedPatches
from ..sharding.group import Gathering, Sharded
from ..sources.base import BlockSource
from ..transfers.base import TransferBackend
from .binding import BlockBinding, JoinPieces, ResidentTensors
from .buffers import BlockBuffer, BufferState
from .route import Route

Stacks: TypeAlias = Mapping[str, Sequence[nn.Module]]
"""Blocks in their order, by the name of their stack."""

BUSY = "this engine is already running a program; wait for that run to end"


class BlockPool:
    """Memory of the blocks of one or more stacks, which are streamed from one source to one device.

    Args:
        stacks: blocks by the name of their stack; they are not changed if the constructor raises.
        policy: resident blocks, prefetch depth, and RAM-resident blocks.
        device: `cpu` or `cuda`.
        source: source of the stored bytes of every block; `detach` closes it.
        shared: RAM that the ranks of one machine share.
        sharded: ranks that keep one shard of every block each; the source must then be a `RangeSource`.
        join: makes the parameters that the source stores in pieces.

    Raises:
        ValueError: the policy does not fit the number of blocks, or the source does not fit a block.
        SourceError: there is not enough RAM for the RAM-resident blocks.
    """

    def __init__(
        self,
        stacks: Stacks,
        *,
        policy: OffloadPolicy,
        device: torch.device,
        source: BlockSource,
        shared: SharedSegment | None = None,
        sharded: Sharded | None = None,
        join: JoinPieces | None = None,
    ) -> None:
        self.device = device
        self.block_counts = {name: len(stack) for name, stack in stacks.items()}
        self._source, self._sharded = source, sharded
        self.formats = source.formats
        self._residency, self._ram_residency, buffers = self._plan_residency(policy)
        lock = runtime_for(device)  # a GPU copies from page-locked memory without blocking the host
        self._patches = StagedPatches(self.formats, lock=lock)
        self._route = Route(source, self.formats, self._patches, device=device, sharded=sharded)
        self._patches.tail = self._route.buffer_bytes
        self.ram = self._route.ram_slots(lock, shared)
        self.ram.check_available(self._ram_residency, self.staging)
        self.ram.resize(self._ram_residency, self.staging)
        self.buffers = tuple(BlockBuffer(index) for index in range(buffers))
        self._start_backend()
        self._running = threading.Lock()
        self._awaits_run = False  # all buffers were allocated for a run not yet begun
        self._bindings = {
            key: BlockBinding(key, block, self.formats[key].computed, join)
            for name, stack in stacks.items()
            for key, block in ((BlockKey(name, index), block) for index, block in enumerate(stack))
        }
        self._resident_tensors = [
            ResidentTensors(block, device, self.formats[BlockKey(name, index)].computed)
            for name, stack in stacks.items()
            for index, block in enumerate(stack)
        ]
        # Nothing below can fail. Blocks are changed only from here on, so that an error above leaves them untouched.
        self.unbind_all()
        for tensors in self._resident_tensors:
            tensors.put()
        self._attached = True
        self._process = os.getpid()

    @property
    def staging(self) -> int:
        """Number of staging slots in RAM; 0 if blocks can be read directly into a buffer."""
        return self._route.staging

    @property
    def block_source(self) -> BlockSource:
        """Source of the bytes that this rank stores: whole blocks, or its shards of them."""
        return self._route.block_source

    @property
    def gathering(self) -> Gathering | None:
        """The group of ranks that keep a shard of every block each; None if blocks are not sharded."""
        return self._route.gathering

    @property
    def loaded_bytes(self) -> int:
        """Current bytes of device memory."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.backend.device_bytes + self.ram.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Current bytes of page-locked host memory."""
        return self.ram.locked_bytes + self._patches.locked_bytes

    @property
    def host_bytes(self) -> int:
        """Current bytes of host memory of slots and patches, page-locked or not."""
        return self.ram.nbytes + self._patches.host_bytes

    @property
    def _buffer_bytes(self) -> int:
        return self._patches.tail + self._patches.tail_bytes

    @property
    def running(self) -> bool:
        """True during a run; memory cannot be released then."""
        return self._running.locked()

    def contents(self) -> dict[int, BlockKey]:
        """Return the blocks that are still in buffers from the last run, by buffer; a new program may keep them."""
        return {b.index: b.key for b in self.buffers if b.state is BufferState.DONE and b.key is not None}

    def check_size(self, programs: RunPrograms) -> None:
        """Raise ValueError for programs that need more buffers or slots than there are now."""
        for needed, existing, word in (
            (programs.device.buffers, len(self.buffers), "buffers"),
            (programs.ram.program.buffers, len(self.ram), "RAM slots"),
        ):
            if needed > existing:
                raise ValueError(f"the program needs {needed} {word}, the engine has {existing}: compile it again")

    def fetch_bytes(self, key: BlockKey) -> int:
        """Return the bytes of one fetch of a block: its stored bytes, or this rank's shard, plus its patch."""
        return self._route.sizes[key.stored] + self._patches.nbytes(key)

    def set_patches(self, patches: Mapping[BlockKey, BlockPatch]) -> None:
        """Replace the patches (LoRA) that are added to blocks on arrival; blocks that are not named have none.

        The factors are copied to host memory. The next run fetches a block that is in a buffer again if the identity
        of its patch has changed; all other blocks are kept.

        Raises:
            RuntimeError: a run is active, or the blocks were detached; nothing was changed.
            ValueError: a patch does not fit its block; the patches are unchanged.
            OSError: there is not enough memory; the patches are unchanged.
        """
        self._check_attached()
        self.claim()
        try:
            prepared = self._patches.prepare(patches)
            changed = self._patches.changed(prepared)
            if changed:
                self.backend.settle()
                for index, key in self.contents().items():
                    if key in changed:
                        self.buffers[index].invalidate()
                self._patches.replace(prepared)
                for buffer in self.buffers:
                    for key in changed:
                        buffer.views.pop(key, None)
                    if 0 < buffer.nbytes < self._buffer_bytes:
                        _free_buffer(buffer)
        finally:
            self.release()

    def release_memory(self, nbytes: int) -> int:
        """Free whole buffers, the least useful first, until `nbytes` or all memory is free; return the bytes freed.

        All other device memory is freed last. The next run allocates and fetches the missing parts.

        Raises:
            RuntimeError: a run is active; nothing was changed.
        """
        self.claim()
        try:
            self.backend.settle()
            self._awaits_run = False
            freed = 0
            for index in eviction_order(range(len(self.buffers)), self.contents(), self._residency):
                if freed >= nbytes:
                    return freed
                freed += _free_buffer(self.buffers[index])
            return freed if freed >= nbytes else freed + self.backend.release_memory()
        finally:
            self.release()

    def release_idle_buffers(self) -> int:
        """Free the buffers without a resident block, and return their bytes.

        The next run allocates them again: in the same memory, if another engine has used it. Does nothing between
        `allocate_buffers` and the next run, and on a CPU, where the system would have to fault in the same pages
        again.

        Raises:
            RuntimeError: a run is active; nothing was changed.
        """
        if self._awaits_run or runtime_for(self.device) is None:
            return 0
        contents = self.contents()
        idle = (b for b in self.buffers if b.index not in contents or not self._residency.keeps(*contents[b.index]))
        return self.release_memory(sum(buffer.nbytes for buffer in idle))

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change the policy between runs; blocks that are resident under both policies are not read again.

        The memory of new buffers is allocated when a run first fetches into them. The policy is unchanged after errors.

        Raises:
            RuntimeError: a run is active, or the blocks were detached.
            ValueError: the policy does not fit the number of blocks.
            SourceError: there is not enough RAM for the RAM-resident blocks.
        """
        self._check_attached()
        residency, ram_residency, buffers = self._plan_residency(policy)
        self._resize(buffers, residency, ram_residency)
        self._residency, self._ram_residency = residency, ram_residency

    def _resize(self, buffers: int, residency: Residency, ram_residency: RamResidency) -> None:
        self.claim()
        try:
            order = eviction_order(range(len(self.buffers)), self.contents(), residency)
            evicted = order[: max(0, len(order) - buffers)]
            # Without streams the buffers that are about to be freed are RAM too.
            freed = sum(self.buffers[index].nbytes for index in evicted) if runtime_for(self.device) is None else 0
            # Before anything is freed, so that a refusal leaves the former policy usable.
            self.ram.check_available(ram_residency, self.staging, freed=freed)
            self.backend.settle()
            for index in evicted:
                _free_buffer(self.buffers[index])
            kept = [buffer for buffer in self.buffers if buffer.index not in evicted]
            self.buffers = (*kept, *(BlockBuffer(index) for index in range(len(kept), buffers)))
            for index, buffer in enumerate(self.buffers):
                buffer.index = index
            self.ram.resize(ram_residency, self.staging)
        finally:
            self.release()

    def restore_buffers(self, program: TransferProgram) -> None:
        """Allocate the buffers that `program` fetches into and that have no memory (compute thread, in a run)."""
        # `allocate_flat` leaves inference mode: a sampler starts runs inside it, but buffers outlive the run, and
        # inference tensors cannot be written outside that mode.
        self._awaits_run = False
        for index in sorted({fetch.buffer for fetch in program.fetches}):
            if self.buffers[index].state is BufferState.ABSENT:
                self.buffers[index].restore(allocate_flat(self._buffer_bytes, self.device))

    def allocate_buffers(self) -> None:
        """Allocate all buffers now, for callers that count their memory before a run.

        Raises:
            RuntimeError: a run is active, and nothing was changed; or the device is out of memory.
        """
        self._check_attached()
        self.claim()
        try:
            for buffer in self.buffers:
                if buffer.state is BufferState.ABSENT:
                    buffer.restore(allocate_flat(self._buffer_bytes, self.device))
            # Earlier work on this stream may still use the memory, and the next run may be on another stream.
            self.backend.begin_run()
            self._awaits_run = True
        finally:
            self.release()

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of another rendezvous, in which this rank has the same shards; they are not read again.

        The buffers are emptied: all ranks must start with the same contents, and a new rank has none.

        Raises:
            RuntimeError: a run is active; nothing was changed.
        """
        assert self._sharded is not None, "the blocks of this engine are not sharded"
        assert self._sharded.resembles(sharded), "different shards need another engine"
        self._check_attached()
        self.claim()
        try:
            self.backend.close()
            self.drop_buffers()
            self._dropped.detach()
            self._route.meet(sharded)
            self._start_backend()
            self._sharded = sharded
        finally:
            self.release()

    def _start_backend(self) -> None:
        self.backend = self._route.transfer_backend()
        # If this pool is deleted without `detach`, the device may still use its memory. The finaliser keeps the RAM
        # slots and, in the backend, the patches: they are unlocked after it.
        self._dropped = weakref.finalize(self, _settle, self.backend, self.ram)
        self._dropped.atexit = False  # the driver may be unloaded by then

    def drop_buffers(self) -> None:
        """Empty all buffers and release their memory. No visit or copy may be using it."""
        for buffer in self.buffers:
            _free_buffer(buffer)

    def detach(self) -> None:
        """Restore every block, and release buffers, RAM and files. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is active, which is not affected; or the device has failed, and the blocks are detached.
        """
        if not self._attached:
            return
        self.claim()
        failed: RuntimeError | None = None
        try:
            try:
                self.backend.close()
            except RuntimeError as err:  # the device has failed, and copies nothing any more
                failed = err
            self.ram.close()
            self._patches.replace({})
            self.drop_buffers()
            self.buffers = ()
        finally:
            self.release()
        self._attached = False
        for binding in self._bindings.values():
            binding.restore()
        for tensors in self._resident_tensors:
            tensors.restore()
        self._source.close()
        if failed is not None:
            raise failed

    def claim(self) -> None:
        """Reserve the engine until `release`; raise RuntimeError if it is reserved already."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(BUSY)

    def release(self) -> None:
        """End the reservation of `claim`."""
        self._running.release()

    def bind(self, key: BlockKey, buffer: BlockBuffer) -> None:
        """Point the modules of a block to its weights in `buffer`, at the start of a visit."""
        self._bindings[key.stored].bind(buffer, self._patches.get(key))

    def unbind(self, key: BlockKey) -> None:
        """Remove the weights of a block from its modules, because another block gets its buffer."""
        self._bindings[key.stored].unbind()

    def unbind_all(self) -> None:
        """Remove the weights of all blocks from their modules, after the last visit."""
        for binding in self._bindings.values():
            binding.unbind()

    def _plan_residency(self, policy: OffloadPolicy) -> tuple[Residency, RamResidency, int]:
        sizes = {
            name: [self.formats[BlockKey(name, index)].computed.nbytes for index in range(count)]
            for name, count in self.block_counts.items()
        }
        residency, buffers = plan_residency(policy, self.block_counts, sizes)
        if self._sharded is not None and self._sharded.on_device:  # every shard is resident, whatever the policy says
            policy = OffloadPolicy.layerwise(source="pinned")
        return residency, plan_ram(policy, residency, self.block_counts), buffers

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("the blocks were detached: attach them again")
        if os.getpid() != self._process:
            # Memory of slots and patches is zero there (`map_memory`), and sources have no threads.
            raise RuntimeError(
                f"the blocks were attached in process {self._process}, of which this is a fork: start this one with "
                'multiprocessing\'s "spawn", and attach them here'
            )


def _settle(backend: TransferBackend, _kept: object) -> None:
    backend.settle()


def _free_buffer(buffer: BlockBuffer) -> int:
    """Release the memory of one buffer between runs and return its bytes."""
    if buffer.state is BufferState.ABSENT:
        return 0
    if buffer.state is BufferState.DONE:
        buffer.invalidate()
    return buffer.release_memory()
