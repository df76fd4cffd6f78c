"""CUDA transfer backend for sharded blocks: copy, gather and decode streams, ordered by events.

The host issues gathers without waiting for them, so it may be a few blocks ahead. The fetch thread issues all gathers
in the order of the program, on a process group that nothing else uses: if two ranks issued the collectives of two
groups in different orders, they would deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...plan import RAW_SLOTS, BlockKey
from ..formats.decode import decode_block
from ..formats.layout import BlockFormat, allocate_flat
from ..patches import StagedPatches
from ..sources.base import BlockSource
from ..transfers.base import BlockCopy, PendingBlock, ReleaseSource
from ..transfers.cuda import DeviceScales
from .group import Gathering
from .shards import GatheredScales, ShardSource


class _GatherSlot:
    """Device memory for one gather: this rank's shard, the gathered block before decoding, the factors of its patch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.shard, self.raw, self.factors = (allocate_flat(0, device) for _ in range(3))
        self.gathered: torch.cuda.Event | None = None  # end of the last gather that read `shard`
        self.used: torch.cuda.Event | None = None  # end of the last decoding that read `raw` and `factors`

    @property
    def nbytes(self) -> int:
        return self.shard.numel() + self.raw.numel() + self.factors.numel()

    def fit(self, shard: int, raw: int, factors: int) -> None:
        """Resize to exactly these numbers of bytes; the contents of a resized part are lost."""
        for name, nbytes in (("shard", shard), ("raw", raw), ("factors", factors)):
            if getattr(self, name).numel() != nbytes:
                setattr(self, name, allocate_flat(0, self._device))  # free first: both must not exist together
                setattr(self, name, allocate_flat(nbytes, self._device))

    def record_streams(self, *streams: torch.cuda.Stream) -> None:
        for memory in (self.shard, self.raw, self.factors):
            for stream in streams:
                memory.record_stream(stream)


class GatherCudaBackend:
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
        for stream in self._streams:  # an aborted run may have left unfinished work there
            current.wait_stream(stream)
        shards = {key: self._shards.shard_bytes(key) for key in self._formats}
        shard = 0 if self._gathering.sharded.on_device else max(shards.values())
        raw = max((self._size * nbytes for key, nbytes in shards.items() if not self._formats[key].is_raw), default=0)
        for slot in self._slots:
            slot.fit(shard, raw, self._patches.largest_bytes)
        for stream in self._streams:  # new memory may still be in use by earlier work on this thread's stream
            stream.wait_stream(current)

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key, into = copy.key, copy.into
        assert copy.stored is not None, f"the shard of {key} has no slot"
        free = cast(torch.cuda.Event, copy.after)
        slot = self._slots[self._turn % RAW_SLOTS]
        self._turn += 1
        shard, copied = self._shard_on_device(copy.stored, slot, copy.release_source)
        fmt, patch = self._formats[key], self._patches.get(key)
        target = (into if fmt.is_raw else slot.raw)[: self._size * shard.numel()]
        gathered = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._gathers):
            if copied is not None:
                self._gathers.wait_event(copied[1])
            self._host_scales.complete(key)
            scales = self._scales.get(key, copies=self._gathers, decodings=self._decodings)
            if fmt.is_raw:
                self._gathers.wait_event(free)
            else:
                self._wait_decoded(self._gathers, slot)
            self._gathering.all_gather(target, shard)
            gathered.record(self._gathers)
        if copied is None:
            # The gather reads the slot itself, so the slot is free only after the gather.
            copy.release_source(gathered.synchronize)
            shard.record_stream(self._gathers)
        slot.gathered = gathered
        # The caching allocator must not hand this memory out again while these streams use it.
        into.record_stream(self._gathers)
        slot.record_streams(*self._streams)
        if fmt.is_raw and patch is None:
            return PendingBlock(
                wait=lambda: torch.cuda.current_stream(self._device).wait_event(gathered), copied=copied
            )
        start, ready = self._decode(key, into, slot, scales, (free, gathered))
        return PendingBlock(
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(ready),
            copied=copied,
            decoded=(start, ready),
        )

    def _shard_on_device(
        self, stored: torch.Tensor, slot: _GatherSlot, release_source: ReleaseSource
    ) -> tuple[torch.Tensor, tuple[torch.cuda.Event, torch.cuda.Event] | None]:
        """Return this rank's shard in device memory, and start and end of its copy; None if it was there already."""
        if stored.is_cuda:
            return stored, None
        shard = slot.shard[: stored.numel()]
        start, copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._copies):
            if slot.gathered is not None:
                self._copies.wait_event(slot.gathered)
            start.record(self._copies)
            shard.copy_(stored, non_blocking=True)
            copied.record(self._copies)
        release_source(copied.synchronize)
        return shard, (start, copied)

    def _decode(
        self,
        key: BlockKey,
        into: torch.Tensor,
        slot: _GatherSlot,
        scales: Mapping[str, torch.Tensor],
        after: tuple[torch.cuda.Event, torch.cuda.Event],
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Decode and patch after the events `after`; return the events at start and end."""
        fmt, patch = self._formats[key], self._patches.get(key)
        start, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._decodings):
            self._wait_decoded(self._decodings, slot)
            if patch is not None:
                slot.factors[: patch.layout.nbytes].copy_(patch.memory, non_blocking=True)
            for event in after:
                self._decodings.wait_event(event)
            start.record(self._decodings)
            if not fmt.is_raw:
                decode_block(slot.raw, into, fmt, scales)
            if patch is not None:
                patch.add_to(into, fmt.computed, slot.factors)
            ready.record(self._decodings)
        slot.used = ready
        into.record_stream(self._decodings)
        return start, ready

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

    def release_memory(self) -> int:
        nbytes = self.device_bytes
        for slot in self._slots:
            slot.fit(0, 0, 0)
        self._scales.clear()
        return nbytes

    def close(self) -> None:
        self.settle()
        self.release_memory()
