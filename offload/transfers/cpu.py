"""Transfer backends without streams.

On a CPU, the fetch thread acts as the copy stream, and buffers in RAM act as device memory.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from ...devices import DeviceEvent
from ..core.pages import host_bytes
from ..formats.decode import decode_block
from ..formats.layout import allocate_flat
from ..sharding.group import GATHERS_AHEAD, Gathering
from ..sources.base import BlockSource
from .base import BlockCopy, PendingBlock, TransferBackend, no_op
from .patches import StagedPatches


class CpuBackend(TransferBackend):
    """Copies bytes on the fetch thread.

    Decodes out of the RAM slot and adds patches on the compute thread.
    """

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key = copy.key
        stored = copy.flat
        into = copy.into
        fmt = self._formats[key.stored]
        patch = copy.patch
        copied: tuple[DeviceEvent, DeviceEvent] | None = None
        if fmt.is_raw and stored is not None:
            start = time.perf_counter()
            # numpy copies on the calling thread. `Tensor.copy_` would use torch's thread pool.
            np.copyto(host_bytes(into[: fmt.stored.nbytes]), host_bytes(stored))
            copied = (start, time.perf_counter())
            if copy.slot_patch is None or patch is None:
                copy.release_source()
        if fmt.is_raw and patch is None:
            return PendingBlock(copied=copied)
        scales = {} if fmt.is_raw else self._source.scales(key.stored)

        # Decoding and patching are torch arithmetic, so both are deferred to the compute thread. On
        # this thread torch would start a second thread pool, which competes with the first one for
        # the cores.
        def decode() -> None:
            if not fmt.is_raw:
                assert stored is not None, f"{key} must be decoded, but has no RAM slot"
                decode_block(stored, into, fmt, scales)
                copy.release_source()  # only now: the slot is the only copy of the stored bytes
            if patch is not None:
                patch.add_to(into, fmt.computed)
                if copy.slot_patch is not None:
                    assert stored is not None, f"{key} has a slot"
                    with copy.slot_patch.writing(patch):
                        np.copyto(host_bytes(stored), host_bytes(into[: fmt.stored.nbytes]))
                    copy.release_source()

        return PendingBlock(decode=decode, copied=copied)


class GatherCpuBackend(CpuBackend):
    """Gathers raw blocks directly into their buffer, and blocks to decode into a raw slot."""

    def __init__(self, source: BlockSource, patches: StagedPatches, gathering: Gathering) -> None:
        super().__init__(source, patches)
        self._gathering = gathering
        self._raw_slots: list[torch.Tensor] = []
        self._turn = 0

    def begin_run(self) -> None:
        largest = [
            self._gathering.gathered_bytes(key)
            for key, fmt in self._formats.items()
            if not fmt.is_raw
        ]
        if largest and not self._raw_slots:
            # `EngineRun` issues at most GATHERS_AHEAD gathers before the compute thread has decoded
            # the first.
            self._raw_slots = [allocate_flat(max(largest), "cpu") for _ in range(GATHERS_AHEAD)]

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key = copy.key
        stored = copy.flat
        assert stored is not None, f"the shard of {key} has no slot"
        if self._formats[key.stored].is_raw:
            target = copy.into
            raw = None
        else:
            target = raw = self._next_raw_slot()
        start = time.perf_counter()
        self._gathering.all_gather(target[: self._gathering.gathered_bytes(key.stored)], stored)
        copied = (start, time.perf_counter())
        copy.release_source()
        # Raw slots are used in turn, and are not released.
        pending = super().copy_in(copy._replace(stored=raw, release_source=no_op))
        return replace(pending, copied=copied)

    @property
    def device_bytes(self) -> int:
        return sum(slot.numel() for slot in self._raw_slots)

    def _next_raw_slot(self) -> torch.Tensor:
        self._turn += 1
        return self._raw_slots[self._turn % GATHERS_AHEAD]

    def release_memory(self) -> int:
        nbytes = self.device_bytes
        self._raw_slots.clear()
        return nbytes


class SynchronousBackend(CpuBackend):
    """Backend without device streams: blocks are completed in RAM and copied on the compute thread.

    Only that thread uses the device. With one work queue, a second thread gains nothing, and
    torch's backend for it need not allow one. Blocks are decoded in RAM, because such devices do
    not have all stored dtypes.
    """

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        def load() -> None:
            fmt = self._formats[copy.key.stored]
            block = copy.flat
            assert block is not None, f"{copy.key} cannot be read directly into device memory"
            patch = copy.patch
            computed = patch if patch is not None and patch.is_computed else None
            if not fmt.is_raw or patch is not computed:
                # As large as the buffer: patch factors may be behind the block.
                block = allocate_flat(copy.into.numel(), "cpu")
                # The slot is kept until the block is on the device.
                in_ram = copy._replace(
                    into=block,
                    release_source=no_op,
                    patch=None if computed else patch,
                    slot_patch=None,
                )
                pending = CpuBackend.copy_in(self, in_ram)
                assert pending.decode is not None
                pending.decode()
            copy.into[: block.numel()].copy_(block)
            if computed is not None:
                factors = computed.memory.to(copy.into.device)
                computed.add_to(copy.into, fmt.computed, factors)
                if copy.slot_patch is not None:
                    with copy.slot_patch.writing(computed):
                        block.copy_(copy.into[: block.numel()])
            copy.release_source()

        return PendingBlock(decode=load)
