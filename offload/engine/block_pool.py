"""Pool for attached blocks: device buffers, RAM slots, patches and transfer backend.

A run reserves the pool with `claim`. Memory, patches, policy and group change only between runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from ...devices import runtime_for
from ...plan.programs import (
    BlockKey,
    BufferSizes,
    RamResidency,
    RunPrograms,
    TransferProgram,
    eviction_order,
    plan_buffers,
    plan_ram,
)
from ...schema import OffloadPolicy, Residency
from ..core.buffers import BlockBuffer, BufferState, contents
from ..formats.layout import allocate_flat
from ..host_memory.shared_segment import SharedSegment
from ..sharding.group import Sharded
from ..sources.base import BlockSource
from ..transfers.base import TransferBackend
from ..transfers.patches import BlockPatch, StagedPatches
from .binding import BlockBinding, JoinPieces, ResidentTensors
from .route import Route

Stacks: TypeAlias = Mapping[str, Sequence[nn.Module]]
"""Blocks in order, by stack name."""

BUSY = "this engine is already running a program; wait for that run to end"


class BlockPool:
    """Memory for the blocks of one or more stacks, streamed from one source to one device.

    Args:
        stacks: blocks by stack name. They are not changed if the constructor raises.
        policy: resident blocks, prefetch depth, and RAM-resident blocks.
        device: compute device.
        source: every block's stored bytes. `detach` closes it.
        shared: RAM shared by the ranks on one machine.
        sharded: ranks that keep one shard of every block each. The source must then be a
            `RangeSource`.
        join: makes parameters stored in pieces.

    Raises:
        ValueError: policy and block count do not match, or the source does not match a block.
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
        self._source = source
        self._sharded = sharded
        self.formats = source.formats
        lock = runtime_for(device)  # a GPU copies from page-locked memory without blocking the host
        self.patches = StagedPatches(self.formats, lock=lock)
        self.route = Route(source, self.patches, device=device, sharded=sharded)
        self._residency, self._ram_residency, self._sizes = self._plan(policy)
        self.ram = self.route.ram_slots(lock, shared)
        self.ram.check_available(self._ram_residency, self.route.staging)
        self.ram.resize(self._ram_residency, self.route.staging)
        self.buffers = tuple(
            BlockBuffer(index, capacity=capacity)
            for index, capacity in enumerate(self._sizes.capacities)
        )
        self._start_backend()
        self._running = threading.Lock()
        self._awaits_run = False  # all buffers were allocated for a run not yet begun
        self.bindings: dict[BlockKey, BlockBinding] = {}
        self._resident_tensors: list[ResidentTensors] = []
        for name, stack in stacks.items():
            for index, block in enumerate(stack):
                key = BlockKey(name, index)
                layout = self.formats[key].computed
                self.bindings[key] = BlockBinding(key, block, layout, join)
                self._resident_tensors.append(ResidentTensors(block, device, layout))
        # Nothing below can fail. Blocks are changed only from here on, so an error above leaves
        # them untouched.
        self.unbind_all()
        for tensors in self._resident_tensors:
            tensors.put()
        self._attached = True
        self._process = os.getpid()

    @property
    def loaded_bytes(self) -> int:
        """Device memory now, in bytes."""
        buffers = sum(buffer.nbytes for buffer in self.buffers)
        return buffers + self.backend.device_bytes + self.ram.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory now, in bytes."""
        return self.ram.locked_bytes + self.patches.locked.nbytes

    @property
    def host_bytes(self) -> int:
        """Host memory in slots and patches now, in bytes, page-locked or not."""
        return self.ram.nbytes + self.patches.host_bytes

    @property
    def running(self) -> bool:
        """True during a run. Memory cannot be released then."""
        return self._running.locked()

    def contents(self) -> dict[int, BlockKey]:
        """See `buffers.contents`."""
        return contents(self.buffers)

    def check_size(self, programs: RunPrograms) -> None:
        """Raise ValueError for programs that need more buffers or slots than exist now."""
        sizes = {
            "buffers": (programs.device.buffers, len(self.buffers)),
            "RAM slots": (programs.ram.program.buffers, len(self.ram)),
        }
        for word, (needed, existing) in sizes.items():
            if needed > existing:
                has = f"the program needs {needed} {word}, the engine has {existing}"
                raise ValueError(f"{has}: compile it again")
        if [self._sizes, self.ram.sizes] != [programs.device.sizes, programs.ram.program.sizes]:
            raise ValueError("the program is for buffers of other sizes: compile it again")

    def set_patches(self, patches: Mapping[BlockKey, BlockPatch]) -> None:
        """Replace the patches (LoRA) to add to blocks on arrival.

        Blocks without an entry have none.

        The factors are copied to host memory. If a block's patch has another identity, the next run
        fetches the block again, and reads it again if the RAM slot has the former patch. All other
        blocks are kept.

        Raises:
            RuntimeError: a run is active, or the blocks were detached. Nothing was changed.
            ValueError: patch and block do not match. The patches are unchanged.
            OSError: there is not enough memory. The patches are unchanged.
        """
        self._check_attached()
        with self._claimed():
            prepared = self.patches.prepare(patches)
            changed = self.patches.changed(prepared)
            if not changed:
                return
            # `replace` frees the former factors' memory, and copies from there may be in progress.
            self.backend.settle()
            for index, key in self.contents().items():
                if key in changed:
                    self.buffers[index].invalidate()
            self.ram.drop_patched(prepared.values())
            self.patches.replace(prepared)
            for buffer in self.buffers:
                for key in changed:
                    # These views point to the former patch's factors.
                    buffer.views.pop(key, None)
                # This buffer has no space for the new factors behind the block.
                if 0 < buffer.nbytes < buffer.capacity + self.patches.tail_bytes:
                    _free_buffer(buffer)

    def release_memory(self, nbytes: int) -> int:
        """Free whole buffers, the least useful first, until `nbytes` or all memory is free.

        Return the bytes freed.

        All other device memory is freed last. The next run allocates and fetches missing parts.

        Raises:
            RuntimeError: a run is active. Nothing was changed.
        """
        with self._claimed():
            self.backend.settle()
            self._awaits_run = False
            freed = 0
            for index in eviction_order(range(len(self.buffers)), self.contents(), self._residency):
                if freed < nbytes:
                    freed += _free_buffer(self.buffers[index])
            if freed < nbytes:
                freed += self.backend.release_memory()
            return freed

    def release_idle_buffers(self) -> int:
        """Free the buffers without a resident block, and return the freed bytes.

        The next run allocates them again: in the same memory, if another engine has used it. Does
        nothing between `allocate_buffers` and the next run, and on a CPU, where the system would
        have to fault in the same pages again.

        Raises:
            RuntimeError: a run is active. Nothing was changed.
        """
        if self._awaits_run or runtime_for(self.device) is None:
            return 0
        kept = {index for index, key in self.contents().items() if self._residency.keeps(*key)}
        idle = (buffer for buffer in self.buffers if buffer.index not in kept)
        # Idle buffers come first in the eviction order, so these bytes free exactly the idle ones.
        return self.release_memory(sum(buffer.nbytes for buffer in idle))

    def release_passing_blocks(self) -> None:
        """Free the memory of all non-resident blocks, on the device and in RAM.

        The next run allocates it again.

        Raises:
            RuntimeError: a run is active. Nothing was changed.
        """
        kept = {index for index, key in self.contents().items() if self._residency.keeps(*key)}
        with self._claimed():
            self.backend.settle()
            self._awaits_run = False
            for buffer in self.buffers:
                if buffer.index not in kept:
                    _free_buffer(buffer)
            # The first call frees the staging slots. The second one adds new slots without memory.
            self.ram.resize(self._ram_residency, 0)
            self.ram.resize(self._ram_residency, self.route.staging)

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change the policy between runs.

        Blocks resident under both policies are not read again.

        New buffers get memory when a run first fetches into them. After an error the policy is
        unchanged.

        Raises:
            RuntimeError: a run is active, or the blocks were detached.
            ValueError: policy and block count do not match.
            SourceError: there is not enough RAM for the RAM-resident blocks.
        """
        self._check_attached()
        residency, ram_residency, sizes = self._plan(policy)
        with self._claimed():
            order = eviction_order(range(len(self.buffers)), self.contents(), residency)
            missing = Counter(sizes.capacities)
            kept: list[BlockBuffer] = []
            # From the most useful on: buffers in excess of the new capacities are the least useful.
            for buffer in (self.buffers[index] for index in reversed(order)):
                if missing[buffer.capacity]:
                    missing[buffer.capacity] -= 1
                    kept.append(buffer)
            evicted = [buffer for buffer in self.buffers if buffer not in kept]
            # Without streams, the buffers freed below are RAM too.
            freed = 0
            if runtime_for(self.device) is None:
                freed = sum(buffer.nbytes for buffer in evicted)
            # Before anything is freed: a refusal then leaves the former policy usable.
            self.ram.check_available(ram_residency, self.route.staging, freed=freed)
            self.backend.settle()
            for buffer in evicted:
                _free_buffer(buffer)
            kept.sort(key=lambda buffer: buffer.index)
            kept += (BlockBuffer(0, capacity=capacity) for capacity in missing.elements())
            for index, buffer in enumerate(kept):
                buffer.index = index
            self.buffers = tuple(kept)
            self.ram.resize(ram_residency, self.route.staging)
            self._residency = residency
            self._ram_residency = ram_residency
            # Kept buffers come first, so the order differs from the planned capacities.
            self._sizes = replace(sizes, capacities=tuple(buffer.capacity for buffer in kept))

    def restore_buffers(self, program: TransferProgram) -> None:
        """Allocate the missing buffers for fetches in `program` (compute thread, in a run)."""
        self._awaits_run = False
        self._allocate(sorted({fetch.buffer for fetch in program.fetches}))

    def _allocate(self, indexes: Iterable[int]) -> None:
        # `allocate_flat` leaves inference mode: a sampler starts runs inside it, but buffers
        # outlive the run, and inference tensors cannot be written outside that mode.
        for buffer in (self.buffers[index] for index in indexes):
            if buffer.state is BufferState.ABSENT:
                nbytes = buffer.capacity + self.patches.tail_bytes
                buffer.restore(allocate_flat(nbytes, self.device))

    def allocate_buffers(self) -> None:
        """Allocate all buffers now, for callers that count memory before a run.

        Raises:
            RuntimeError: a run is active, and nothing was changed, or the device is out of memory.
        """
        self._check_attached()
        with self._claimed():
            self._allocate(range(len(self.buffers)))
            # Earlier work on this stream may still use the memory, and the next run may be on
            # another stream.
            self.backend.begin_run()
            self._awaits_run = True

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks in another rendezvous, where this rank has the same shards.

        The shards are not read again.

        The buffers are emptied: all ranks must start with the same contents, and a new rank has
        none.

        Raises:
            RuntimeError: a run is active. Nothing was changed.
        """
        assert self._sharded is not None, "the blocks of this engine are not sharded"
        assert self._sharded.resembles(sharded), "different shards need another engine"
        self._check_attached()
        with self._claimed():
            self.backend.close()
            self.drop_buffers()
            # The former finaliser would keep the closed backend alive as long as this pool.
            self._dropped.detach()
            self.route.meet(sharded)
            self._start_backend()
            self._sharded = sharded

    def _start_backend(self) -> None:
        self.backend = self.route.transfer_backend()
        # If this pool is deleted without `detach`, the device may still use its memory. The
        # finaliser keeps the RAM slots and, in the backend, the patches: both are unlocked after
        # it.
        self._dropped = weakref.finalize(self, _settle, self.backend, self.ram)
        self._dropped.atexit = False  # the driver may be unloaded by then

    def drop_buffers(self) -> None:
        """Empty all buffers and release their memory. No visit or copy may be using it."""
        for buffer in self.buffers:
            _free_buffer(buffer)

    def detach(self) -> None:
        """Restore every block, and release buffers, RAM and files. Detaching twice is allowed.

        Raises:
            RuntimeError: a run is active, and continues, or the device has failed, and the blocks
                are detached.
        """
        if not self._attached:
            return
        failed: RuntimeError | None = None
        with self._claimed():
            try:
                self.backend.close()
            except RuntimeError as err:  # the device has failed, and copies nothing any more
                failed = err
            self.ram.close()
            self.patches.replace({})
            self.drop_buffers()
            self.buffers = ()
        self._attached = False
        for binding in self.bindings.values():
            binding.restore()
        for tensors in self._resident_tensors:
            tensors.restore()
        # `ram.close` unlocks pages of the source's tensors, so the source closes afterwards.
        self._source.close()
        if failed is not None:
            raise failed

    def claim(self) -> None:
        """Reserve the engine until `release`. Raise RuntimeError if it is reserved already."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(BUSY)

    def release(self) -> None:
        """End the reservation made by `claim`."""
        self._running.release()

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        self.claim()
        try:
            yield
        finally:
            self.release()

    def unbind_all(self) -> None:
        """Remove all blocks' weights from their modules, after the last visit."""
        for binding in self.bindings.values():
            binding.unbind()

    def _plan(self, policy: OffloadPolicy) -> tuple[Residency, RamResidency, BufferSizes]:
        computed = {
            name: [self.route.computed_sizes[BlockKey(name, index)] for index in range(count)]
            for name, count in self.block_counts.items()
        }
        residency, sizes = plan_buffers(policy, computed)
        if self._sharded is not None and self._sharded.on_device:
            # Every shard is resident, whatever the policy says.
            policy = OffloadPolicy.layerwise(source="pinned")
        return residency, plan_ram(policy, residency, self.block_counts), sizes

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("the blocks were detached: attach them again")
        if os.getpid() != self._process:
            # Memory of slots and patches is zero there (`map_memory`), and sources have no threads.
            raise RuntimeError(
                f"the blocks were attached in process {self._process}, of which this is a fork: "
                'start this one with multiprocessing\'s "spawn", and attach them here'
            )


def _settle(backend: TransferBackend, _kept: object) -> None:
    backend.settle()


def _free_buffer(buffer: BlockBuffer) -> int:
    """Release one buffer's memory between runs and return the freed bytes."""
    if buffer.state is BufferState.ABSENT:
        return 0
    if buffer.state is BufferState.DONE:
        buffer.invalidate()
    return buffer.release_memory()
