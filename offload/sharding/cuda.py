"""Transfer backend for sharded blocks on devices with streams: copy, gather and decode streams, ordered by events.

The host issues gathers without waiting for them, so it may be a few blocks ahead. The fetch thread issues all gathers
in the order of the program, on a process group that nothing else uses: if two ranks issued the collectives of two
groups in different orders, they would deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...devices import DeviceRuntime, Event
from ...plan import BlockKey
from ..formats.layout import BlockFormat
from ..host_memory.pages import copy_to_device
from ..patches import StagedPatches
from ..sources.base import BlockSource
from ..transfers.base import BlockCopy, PendingBlock, ReleaseSource
from ..transfers.cuda import CudaStreams, RawSlot
from .group import Gathering
from .shards import ShardSource


class GatherCudaBackend(CudaStreams):
    """Gathers raw blocks directly into their buffer, and blocks that need decoding into a raw slot.

    A shard in RAM is copied to the device first; a shard in device memory is gathered from its slot.
    """

    def __init__(
        self,
        source: BlockSource,
        shards: ShardSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        gathering: Gathering,
        *,
        runtime: DeviceRuntime,
    ) -> None:
        self._gathering = gathering
        self._size = gathering.sharded.gather.size
        sizes = {key: shards.shard_bytes(key) for key in formats}
        super().__init__(
            source,
            formats,
            patches,
            runtime=runtime,
            raw_bytes=max((self._size * sizes[key] for key, fmt in formats.items() if not fmt.is_raw), default=0),
            shard_bytes=0 if gathering.sharded.on_device else max(sizes.values()),
        )
        self._gathers = runtime.borrow_stream()
        self._streams.append(self._gathers)

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key, into = copy.key, copy.into
        stored = copy.flat
        assert stored is not None, f"the shard of {key} has no slot"
        free = cast(Event, copy.after)
        slot = self._next_slot()
        shard, copied = self._shard_on_device(stored, slot, copy.release_source)
        fmt, patch = self._formats[key.stored], self._patches.get(key)
        target = (into if fmt.is_raw else slot.raw)[: self._size * shard.numel()]
        gathered = self._runtime.event(timing=True, blocking=True)
        with self._runtime.on_stream(self._gathers):
            if copied is not None:
                self._gathers.wait_event(copied[1])
            scales = self._scales.get(key.stored, copies=self._gathers)
            if fmt.is_raw:
                self._gathers.wait_event(free)
            elif slot.used is not None:
                self._gathers.wait_event(slot.used)
            self._gathering.all_gather(target, shard)
            gathered.record(self._gathers)
        if copied is None:
            # The gather reads the slot itself, so the slot is free only after the gather.
            copy.release_source(gathered.synchronize)
        slot.gathered = gathered
        if fmt.is_raw and patch is None:
            return PendingBlock(wait=self._wait_for(gathered), copied=copied)
        if patch is not None:
            with self._runtime.on_stream(self._decodings):
                copy_to_device(slot.factors[: patch.layout.nbytes], patch.memory)
        decoded = self._decode(copy, slot, scales, after=(free, gathered))
        return PendingBlock(wait=self._wait_for(decoded[1]), copied=copied, decoded=decoded)

    def _shard_on_device(
        self, stored: torch.Tensor, slot: RawSlot, release_source: ReleaseSource
    ) -> tuple[torch.Tensor, tuple[Event, Event] | None]:
        """Return this rank's shard in device memory, and start and end of its copy; None if it was there already."""
        if stored.device.type != "cpu":
            return stored, None
        shard = slot.shard[: stored.numel()]
        start, copied = self._runtime.event(timing=True), self._runtime.event(timing=True, blocking=True)
        with self._runtime.on_stream(self._copies):
            if slot.gathered is not None:
                self._copies.wait_event(slot.gathered)
            start.record(self._copies)
            copy_to_device(shard, stored)
            copied.record(self._copies)
        release_source(copied.synchronize)
        return shard, (start, copied)
