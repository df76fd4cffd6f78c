"""Transfer backends with copy and decode streams, ordered with the compute stream by events.

For sharded blocks the host issues gathers without waiting for them, so it may be a few blocks
ahead. The fetch thread issues all gathers in program order, on a process group of their own. If two
ranks issued collectives in two groups in different orders, they would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import cast

import torch

from ...devices import DeviceRuntime, Event, Stream
from ...plan.programs import RAW_SLOTS, BlockKey
from ..core.pages import HostBlock, ScatteredBlock, copy_to_device, copy_to_host
from ..formats.decode import decode_block, prepare_decoding
from ..formats.layout import allocate_flat
from ..formats.packing import Constants
from ..sharding.group import Gathering
from ..sources.base import BlockSource
from .base import BlockCopy, PendingBlock, TransferBackend
from .patches import StagedPatches


class RawSlot:
    """Device memory for a decoded block's stored bytes, its patch factors, and a shard."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.raw, self.factors, self.shard = (allocate_flat(0, runtime.device) for _ in range(3))
        self.used: Event | None = None  # end of the last decoding out of `raw` and `factors`
        self.gathered: Event | None = None  # end of the last gather out of `shard`

    @property
    def nbytes(self) -> int:
        return self.raw.numel() + self.factors.numel() + self.shard.numel()

    def fit(self, raw: int, factors: int, shard: int = 0) -> None:
        """Resize to exactly these byte counts. The contents of a resized part are lost."""
        for name, nbytes in (("raw", raw), ("factors", factors), ("shard", shard)):
            if getattr(self, name).numel() != nbytes:
                # Free first: both must not exist together.
                setattr(self, name, allocate_flat(0, self._runtime.device))
                setattr(self, name, allocate_flat(nbytes, self._runtime.device))


class CudaStreams(TransferBackend):
    """Copy and decode streams next to the compute stream, ordered by events only, and raw slots.

    A run may compute on another stream than the run before it, or than the stream the buffers were
    allocated on. Memory is freed only after `settle`: with `record_stream`, torch's allocator would
    count freed memory as used until its next allocation.

    Args:
        source: source of the scales.
        patches: block patches.
        runtime: runtime for the buffers' device.
    """

    _shard_bytes = 0
    """Bytes in the largest shard copied to the device."""

    def __init__(self, source: BlockSource, patches: StagedPatches, runtime: DeviceRuntime) -> None:
        super().__init__(source, patches)
        self._runtime = runtime
        self._raw_bytes = max(
            (self._bytes_on_device(key) for key, fmt in self._formats.items() if not fmt.is_raw),
            default=0,
        )
        prepare_decoding(self._formats.values(), runtime.device)
        self._copies = runtime.borrow_stream()
        self._decodings = runtime.borrow_stream()
        self._streams = [self._copies, self._decodings]
        self._slots = [RawSlot(runtime) for _ in range(RAW_SLOTS)]
        self._turn = 0
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}
        self._constants: Constants = {}

    def begin_run(self) -> None:
        current = self._runtime.current_stream()
        # Only the last run's compute stream has waited for the copy of a kept block, and this run
        # may compute on another stream. An aborted run may also have left unfinished work on
        # buffers. The first copy in this run into a buffer waits for an event on `current`, and so
        # for that work.
        for stream in self._streams:
            current.wait_stream(stream)
        # Only on the compute thread, and before the streams wait for that thread's stream: the
        # allocator may return memory still used by earlier work on that stream.
        for slot in self._slots:
            slot.fit(self._raw_bytes, self._patches.largest_bytes, self._shard_bytes)
        for stream in self._streams:  # needed for slots too: copies into them wait for no visit
            stream.wait_stream(current)

    def _bytes_on_device(self, key: BlockKey) -> int:
        """Return a block's bytes on the device before it is decoded."""
        return self._formats[key].stored.nbytes

    def _scales_on_device(self, key: BlockKey, copies: Stream) -> Mapping[str, torch.Tensor]:
        """Return a block's fp32 scales. The first call copies them on `copies`."""
        if key not in self._scales:
            scales = self._source.scales(key)
            with self._runtime.on_stream(copies):
                # A blocking copy would wait for the copy stream, and with it for the visits this
                # stream waits for.
                self._scales[key] = {
                    name: scale.to(self._runtime.device, non_blocking=True)
                    for name, scale in scales.items()
                }
        return self._scales[key]

    def _next_slot(self) -> RawSlot:
        self._turn += 1
        return self._slots[self._turn % RAW_SLOTS]

    def _copy(
        self, stored: HostBlock, into: torch.Tensor, after: Sequence[Event]
    ) -> tuple[Event, Event]:
        """Copy page-locked memory to the device after the events `after`.

        Return the events at start and end. The copy is only issued. The thread that refills the
        slot calls `synchronize` first, so neither this thread nor the compute thread waits for the
        bus.
        """
        start = self._runtime.event(timing=True)
        # A thread that waits for a blocking event sleeps instead of spinning on a core.
        copied = self._runtime.event(timing=True, blocking=True)
        with self._runtime.on_stream(self._copies):
            for event in after:
                self._copies.wait_event(event)
            start.record(self._copies)
            copy_to_device(into, stored)
            copied.record(self._copies)
        return start, copied

    def _wait_for(self, event: Event) -> Callable[[], object]:
        # The visit's stream, which need not be this thread's current stream.
        return lambda: self._runtime.current_stream().wait_event(event)

    def _decode(
        self,
        copy: BlockCopy,
        slot: RawSlot,
        scales: Mapping[str, torch.Tensor],
        *,
        after: tuple[Event, Event],
    ) -> tuple[Event, Event]:
        """Decode and patch out of `slot`, after the events `after`.

        Return the events at start and end.
        """
        fmt = self._formats[copy.key.stored]
        start, ready = (self._runtime.event(timing=True) for _ in range(2))
        with self._runtime.on_stream(self._decodings):
            for event in after:
                self._decodings.wait_event(event)
            start.record(self._decodings)
            if not fmt.is_raw:
                decode_block(slot.raw, copy.into, fmt, scales, self._constants)
            if copy.patch is not None:
                copy.patch.add_to(copy.into, fmt.computed, slot.factors)
            ready.record(self._decodings)
        slot.used = ready
        return start, ready

    def end_run(self) -> None:
        # All later copies, and the `settle` in `close`, come after the last visits.
        for stream in self._streams:
            stream.wait_stream(self._runtime.current_stream())

    @property
    def device_bytes(self) -> int:
        # Lists, because the fetch thread may add a block while this one iterates.
        scales = (block.values() for block in list(self._scales.values()))
        kept = chain(*scales, *list(self._constants.values()))
        return sum(slot.nbytes for slot in self._slots) + sum(tensor.nbytes for tensor in kept)

    def settle(self) -> None:
        # Covers the visits too: `end_run` has ordered the streams behind them.
        for stream in self._streams:
            stream.synchronize()

    def release_memory(self) -> int:
        nbytes = self.device_bytes
        for slot in self._slots:
            slot.fit(0, 0)
        self._scales.clear()
        self._constants.clear()
        return nbytes

    def close(self) -> None:
        try:
            super().close()
        except RuntimeError:
            self._streams.clear()  # no other backend may borrow streams of a failed device
            raise
        while self._streams:
            self._runtime.return_stream(self._streams.pop())


class CudaBackend(CudaStreams):
    """Copies blocks from RAM slots.

    Blocks without decoding or patch are copied directly into their buffer. Stored bytes in other
    formats are copied into one of two raw slots. That copy waits for the decoding two fetches
    earlier, not for the buffer, so the bus stays busy during decoding. A block with a
    `ComputedPatch` is copied back to its slot.
    """

    _written: Event | None = None
    """End of the last write to a slot, until the copy stream waits for it."""

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        assert copy.stored is not None, f"{copy.key} cannot be read directly into device memory"
        fmt = self._formats[copy.key.stored]
        patch = copy.patch
        free = cast(Event, copy.after)
        raw = copy.into[: fmt.stored.nbytes]
        # No visit waits for a write, so a buffer may be free before the write has read it.
        after = [] if self._written is None else [self._written]
        self._written = None
        if patch is None and fmt.is_raw:
            copied = self._copy(copy.stored, raw, [*after, free])
            copy.release_source(copied[1].synchronize)
            return PendingBlock(wait=self._wait_for(copied[1]), copied=copied)
        slot = self._next_slot()
        scales = self._scales_on_device(copy.key.stored, self._copies)
        if slot.used is not None:
            after.append(slot.used)
        # Only a copy into the buffer itself waits for the buffer. A copy into the raw slot runs
        # ahead.
        if fmt.is_raw:
            after.append(free)
        else:
            raw = slot.raw[: fmt.stored.nbytes]
        start, end = self._copy(copy.stored, raw, after)
        left = end
        try:
            if patch is not None:
                end = self._runtime.event(timing=True)
                with self._runtime.on_stream(self._copies):
                    copy_to_device(slot.factors[: patch.layout.nbytes], patch.memory)
                    end.record(self._copies)
            decoded = self._decode(copy, slot, scales, after=(end, free))
            if patch is not None and copy.slot_patch is not None:
                left = self._written = self._runtime.event(blocking=True)
                with copy.slot_patch.writing(patch):
                    self._write_back(copy.stored, raw, left)
        finally:  # after an error too, work that uses the slot is on its way
            copy.release_source(left.synchronize)
        return PendingBlock(wait=self._wait_for(decoded[1]), copied=(start, end), decoded=decoded)

    def _write_back(self, stored: HostBlock, block: torch.Tensor, written: Event) -> None:
        """Copy a patched block to its slot, and record the end."""
        assert not isinstance(stored, ScatteredBlock), "another model's tensors are never changed"
        with self._runtime.on_stream(self._decodings):
            try:
                copy_to_host(stored, block)
            finally:
                written.record(self._decodings)


class GatherCudaBackend(CudaStreams):
    """Gathers raw blocks directly into their buffer, and blocks to decode into a raw slot.

    A shard in RAM is copied to the device first. A shard in device memory is gathered from its
    slot.
    """

    def __init__(
        self,
        source: BlockSource,
        patches: StagedPatches,
        runtime: DeviceRuntime,
        gathering: Gathering,
    ) -> None:
        # The base class's constructor calls `_bytes_on_device`, so this comes first.
        self._gathering = gathering
        super().__init__(source, patches, runtime)
        if not gathering.sharded.on_device:
            self._shard_bytes = max(map(gathering.shard_bytes, self._formats))
        self._gathers = runtime.borrow_stream()
        self._streams.append(self._gathers)

    def _bytes_on_device(self, key: BlockKey) -> int:
        return self._gathering.gathered_bytes(key)

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key = copy.key
        into = copy.into
        stored = copy.flat
        assert stored is not None, f"the shard of {key} has no slot"
        free = cast(Event, copy.after)
        slot = self._next_slot()
        shard = stored
        copied: tuple[Event, Event] | None = None
        if stored.device.type == "cpu":
            shard = slot.shard[: stored.numel()]
            copied = self._copy(stored, shard, [] if slot.gathered is None else [slot.gathered])
            copy.release_source(copied[1].synchronize)
        fmt = self._formats[key.stored]
        patch = copy.patch
        target = (into if fmt.is_raw else slot.raw)[: self._gathering.gathered_bytes(key.stored)]
        gathered = self._runtime.event(timing=True, blocking=True)
        with self._runtime.on_stream(self._gathers):
            if copied is not None:
                self._gathers.wait_event(copied[1])
            # The scales are copied on this stream, because the decoding waits for `gathered`.
            scales = self._scales_on_device(key.stored, self._gathers)
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
            # On this stream, the copy follows the last decoding that read the slot's factors.
            with self._runtime.on_stream(self._decodings):
                copy_to_device(slot.factors[: patch.layout.nbytes], patch.memory)
        decoded = self._decode(copy, slot, scales, after=(free, gathered))
        return PendingBlock(wait=self._wait_for(decoded[1]), copied=copied, decoded=decoded)
