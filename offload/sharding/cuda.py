"""Gathering on CUDA: a stream that copies the own shard, one that gathers, one that decodes; their order is by events.

The host issues and never waits for a gather, so it may be a few blocks ahead. All gathers are issued by the fetch
thread, in the order of the program, on a group that nobody else uses: collectives of two groups that meet in another
order on another rank would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...devices import DeviceEvent
from ...plan import RAW_SLOTS, BlockKey
from ..formats.decode import decode_block
from ..formats.layout import BlockFormat, allocate_flat
from ..patches import StagedPatches
from ..sources.base import BlockSource
from ..transfers.base import PendingBlock, ReleaseSource
from ..transfers.cuda import DeviceScales
from .group import Gathering
from .scales import GatheredScales
from .shards import ShardSource


class _GatherSlot:
    """Device memory for one gather: the own shard on its way, the whole block to be decoded, factors of its patch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.shard, self.raw, self.factors = (allocate_flat(0, device) for _ in range(3))
        self.gathered: torch.cuda.Event | None = None  # the gather that read `shard` last
        self.used: torch.cuda.Event | None = None  # the decoding that read `raw` and `factors` last

    @property
    def nbytes(self) -> int:
        return self.shard.numel() + self.raw.numel() + self.factors.numel()

    def fit(self, shard: int, raw: int, factors: int) -> None:
        """Have exactly this much memory; what it held is lost."""
        for name, nbytes in (("shard", shard), ("raw", raw), ("factors", factors)):
            if getattr(self, name).numel() != nbytes:
                setattr(self, name, allocate_flat(0, self._device))  # the old memory goes before the new one comes
                setattr(self, name, allocate_flat(nbytes, self._device))

    def record_streams(self, *streams: torch.cuda.Stream) -> None:
        for memory in (self.shard, self.raw, self.factors):
            for stream in streams:
                memory.record_stream(stream)


class GatheredCudaStreams:
    """Blocks that are computed as they are stored are gathered straight into their buffer, others into a raw slot.

    A shard that lies in RAM is copied to the device before; one that lies there is gathered from where it is.
    """

    def __init__(
        self,
        source: BlockSource,
        shards: ShardSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        gathering: Gathering,
        *,
        device: torch.device,
    ) -> None:
        self._shards = shards
        self._formats = formats
        self._patches = patches
        self._gathering = gathering
        self._device = device
        self._size = gathering.sharded.gather.size
        self._host_scales = GatheredScales(gathering, shards, device)
        self._scales = DeviceScales(source, device)
        self._copies, self._gathers, self._decodings = (torch.cuda.Stream(device) for _ in range(3))
        self._slots = [_GatherSlot(device) for _ in range(RAW_SLOTS)]
        self._turn = 0

    def begin_run(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:  # behind what a run that was cut short left under way there
            current.wait_stream(stream)
        shards = {key: self._shards.shard_bytes(key) for key in self._formats}
        own = 0 if self._gathering.sharded.on_device else max(shards.values())
        raw = max((self._size * nbytes for key, nbytes in shards.items() if not self._formats[key].is_raw), default=0)
        for slot in self._slots:
            slot.fit(own, raw, self._patches.largest)
        for stream in self._streams:  # fresh memory may still be used by earlier work of this thread's stream
            stream.wait_stream(current)

    def land(
        self,
        key: BlockKey,
        stored: torch.Tensor | None,
        into: torch.Tensor,
        after: DeviceEvent,
        leave: ReleaseSource,
    ) -> PendingBlock:
        assert stored is not None, f"the shard of {key} lies in no slot"
        free = cast(torch.cuda.Event, after)
        slot = self._slots[self._turn % RAW_SLOTS]
        self._turn += 1
        own, copied = self._own(stored, slot, leave)
        fmt, patch = self._formats[key], self._patches.get(key)
        target = (into if fmt.is_raw else slot.raw)[: self._size * own.numel()]
        gathered = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._gathers):
            if copied is not None:
                self._gathers.wait_event(copied[1])
            self._host_scales.complete(key)
            scales = self._scales.of(key, copies=self._gathers, decodings=self._decodings)
            if fmt.is_raw:
                self._gathers.wait_event(free)
            else:
                self._wait_decoded(self._gathers, slot)
            self._gathering.all_gather(target, own)
            gathered.record(self._gathers)
        if copied is None:
            leave(gathered.synchronize)
            own.record_stream(self._gathers)
        slot.gathered = gathered
        into.record_stream(self._gathers)
        slot.record_streams(*self._streams)
        if fmt.is_raw and patch is None:
            return PendingBlock(
                wait=lambda: torch.cuda.current_stream(self._device).wait_event(gathered), copied=copied
            )
        began, ready = self._decoded(key, into, slot, scales, (free, gathered))
        return PendingBlock(
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(ready),
            copied=copied,
            decoded=(began, ready),
        )

    def _own(
        self, stored: torch.Tensor, slot: _GatherSlot, leave: ReleaseSource
    ) -> tuple[torch.Tensor, tuple[torch.cuda.Event, torch.cuda.Event] | None]:
        """The own shard on the device, and when it was copied there; None where it was there already."""
        if stored.is_cuda:
            return stored, None
        own = slot.shard[: stored.numel()]
        began, copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._copies):
            if slot.gathered is not None:
                self._copies.wait_event(slot.gathered)
            began.record(self._copies)
            own.copy_(stored, non_blocking=True)
            copied.record(self._copies)
        leave(copied.synchronize)
        return own, (began, copied)

    def _decoded(
        self,
        key: BlockKey,
        into: torch.Tensor,
        slot: _GatherSlot,
        scales: Mapping[str, torch.Tensor],
        after: tuple[torch.cuda.Event, torch.cuda.Event],
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Decode and patch when `after` is over; returns when that began and ended."""
        fmt, patch = self._formats[key], self._patches.get(key)
        began, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._decodings):
            self._wait_decoded(self._decodings, slot)
            if patch is not None:
                slot.factors[: patch.layout.nbytes].copy_(patch.memory, non_blocking=True)
            for event in after:
                self._decodings.wait_event(event)
            began.record(self._decodings)
            if not fmt.is_raw:
                decode_block(slot.raw, into, fmt, scales)
            if patch is not None:
                patch.add_to(into, fmt.computed, slot.factors)
            ready.record(self._decodings)
        slot.used = ready
        into.record_stream(self._decodings)
        return began, ready

    def _wait_decoded(self, stream: torch.cuda.Stream, slot: _GatherSlot) -> None:
        if slot.used is not None:
            stream.wait_event(slot.used)

    @property
    def _streams(self) -> tuple[torch.cuda.Stream, ...]:
        return (self._copies, self._gathers, self._decodings)

    def end_run(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def device_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots) + self._scales.nbytes

    def settle(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def give_back(self) -> int:
        nbytes = self.device_bytes
        for slot in self._slots:
            slot.fit(0, 0, 0)
        self._scales.clear()
        return nbytes

    def close(self) -> None:
        self.settle()
        self.give_back()
