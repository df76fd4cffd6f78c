"""Transfer backend of devices with streams: copy and decode streams, ordered with the compute stream by events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from ...devices import DeviceRuntime, Event, Stream
from ...plan import RAW_SLOTS, BlockKey
from ..formats.decode import decode_block, prepare_decoding
from ..formats.layout import BlockFormat, allocate_flat
from ..formats.packing import Constants
from ..host_memory.pages import HostBlock, copy_to_device
from ..patches import StagedPatch, StagedPatches
from ..sources.base import BlockSource
from .base import BlockCopy, PendingBlock, TransferBackend


class DeviceScales:
    """Cache of fp32 scales in device memory, by block and parameter name."""

    def __init__(self, source: BlockSource, runtime: DeviceRuntime) -> None:
        self._source = source
        self._runtime = runtime
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        # A list, because another thread may add a block while this one iterates.
        return sum(scale.nbytes for block in list(self._scales.values()) for scale in block.values())

    def get(self, key: BlockKey, *, copies: Stream) -> Mapping[str, torch.Tensor]:
        """Return the scales of a block; on the first call, copy them on `copies`."""
        if key not in self._scales:
            scales = self._source.scales(key)
            with self._runtime.on_stream(copies):
                # A blocking copy would wait for the copy stream, and with it for the visits that stream waits for.
                self._scales[key] = {
                    name: scale.to(self._runtime.device, non_blocking=True) for name, scale in scales.items()
                }
        return self._scales[key]

    def clear(self) -> None:
        """Release all scales; `get` copies each of them again."""
        self._scales.clear()


class RawSlot:
    """Device memory for the stored bytes of a block that is decoded, for the factors of its patch, and for a shard."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.raw, self.factors, self.shard = (allocate_flat(0, runtime.device) for _ in range(3))
        self.used: Event | None = None  # end of the last decoding that read `raw` and `factors`
        self.gathered: Event | None = None  # end of the last gather that read `shard`

    @property
    def nbytes(self) -> int:
        return self.raw.numel() + self.factors.numel() + self.shard.numel()

    def fit(self, raw: int, factors: int, shard: int = 0) -> None:
        """Resize to exactly these numbers of bytes; the contents of a resized part are lost."""
        for name, nbytes in (("raw", raw), ("factors", factors), ("shard", shard)):
            if getattr(self, name).numel() != nbytes:
                setattr(self, name, allocate_flat(0, self._runtime.device))  # free first: both must not exist together
                setattr(self, name, allocate_flat(nbytes, self._runtime.device))


class CudaStreams(TransferBackend):
    """Copy stream and decode stream next to the compute stream, ordered by events only, and the slots for decoding.

    A run may compute on another stream than the run before it, or than the stream that the buffers were allocated on.
    Memory is freed only after `settle`: with `record_stream`, torch's allocator would count freed memory as used until
    its next allocation.

    Args:
        source: source of the scales.
        formats: formats of all blocks.
        patches: patches of blocks.
        runtime: calls of the device of the buffers.
        raw_bytes: bytes of the largest block that is decoded.
        shard_bytes: bytes of the largest shard that is copied to the device.
    """

    def __init__(
        self,
        source: BlockSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        *,
        runtime: DeviceRuntime,
        raw_bytes: int,
        shard_bytes: int,
    ) -> None:
        super().__init__(source, formats, patches)
        self._runtime = runtime
        self._raw_bytes, self._shard_bytes = raw_bytes, shard_bytes
        prepare_decoding(formats.values(), runtime.device)
        self._copies = runtime.borrow_stream()
        self._decodings = runtime.borrow_stream()
        self._streams = [self._copies, self._decodings]
        self._slots = [RawSlot(runtime) for _ in range(RAW_SLOTS)]
        self._turn = 0
        self._scales = DeviceScales(source, runtime)
        self._constants: Constants = {}

    def begin_run(self) -> None:
        current = self._runtime.current_stream()
        # The copy into a block that is kept from the last run was waited for by the stream that computed then, which
        # may be another one. An aborted run may also have left work on buffers unfinished: the first copy of this run
        # into a buffer waits for an event on `current`, and so for that work.
        for stream in self._streams:
            current.wait_stream(stream)
        # Only on the compute thread, and before the streams wait for that thread's stream: the allocator may return
        # memory that earlier work on that stream still uses.
        for slot in self._slots:
            slot.fit(self._raw_bytes, self._patches.largest_bytes, self._shard_bytes)
        for stream in self._streams:  # needed for slots too: copies into them wait for no visit
            stream.wait_stream(current)

    def _next_slot(self) -> RawSlot:
        self._turn += 1
        return self._slots[self._turn % RAW_SLOTS]

    def _wait_for(self, event: Event) -> Callable[[], object]:
        # The stream of the visit, which need not be the stream that is current on this thread.
        return lambda: self._runtime.current_stream().wait_event(event)

    def _decode(
        self,
        copy: BlockCopy,
        slot: RawSlot,
        scales: Mapping[str, torch.Tensor],
        *,
        after: tuple[Event, Event],
    ) -> tuple[Event, Event]:
        """Decode and patch out of `slot`, after the events `after`; return the events at start and end."""
        fmt, patch = self._formats[copy.key.stored], self._patches.get(copy.key)
        start, ready = (self._runtime.event(timing=True) for _ in range(2))
        with self._runtime.on_stream(self._decodings):
            for event in after:
                self._decodings.wait_event(event)
            start.record(self._decodings)
            if not fmt.is_raw:
                decode_block(slot.raw, copy.into, fmt, scales, self._constants)
            if patch is not None:
                patch.add_to(copy.into, fmt.computed, slot.factors)
            ready.record(self._decodings)
        slot.used = ready
        return start, ready

    def end_run(self) -> None:
        # All later copies, and the `settle` of `close`, come after the last visits.
        for stream in self._streams:
            stream.wait_stream(self._runtime.current_stream())

    @property
    def device_bytes(self) -> int:
        constants = sum(tensor.nbytes for tensors in list(self._constants.values()) for tensor in tensors)
        return sum(slot.nbytes for slot in self._slots) + self._scales.nbytes + constants

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

    Blocks that need neither decoding nor a patch are copied directly into their buffer. The stored bytes of other
    formats are copied into one of two raw slots. That copy waits for the decoding two fetches earlier, not for the
    buffer, so the bus stays busy while blocks are decoded.
    """

    def __init__(
        self,
        source: BlockSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        *,
        runtime: DeviceRuntime,
    ) -> None:
        raw_bytes = max((fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw), default=0)
        super().__init__(source, formats, patches, runtime=runtime, raw_bytes=raw_bytes, shard_bytes=0)

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        assert copy.stored is not None, f"{copy.key} cannot be read directly into device memory"
        patch = self._patches.get(copy.key)
        if patch is None and self._formats[copy.key.stored].is_raw:
            return self._copy(copy, copy.stored)
        return self._copy_and_decode(copy, copy.stored, patch)

    def _copy(self, copy: BlockCopy, stored: HostBlock) -> PendingBlock:
        into = copy.into[: self._formats[copy.key.stored].stored.nbytes]
        free = cast(Event, copy.after)
        start = self._runtime.event(timing=True)
        copied = self._runtime.event(timing=True, blocking=True)
        with self._runtime.on_stream(self._copies):
            self._copies.wait_event(free)
            start.record(self._copies)
            copy_to_device(into, stored)
            copied.record(self._copies)
        # The copy is only issued. The thread that refills the slot calls `synchronize` first, so that neither this
        # thread nor the compute thread waits for the bus.
        copy.release_source(copied.synchronize)
        return PendingBlock(wait=self._wait_for(copied), copied=(start, copied))

    def _copy_and_decode(self, copy: BlockCopy, stored: HostBlock, patch: StagedPatch | None) -> PendingBlock:
        into, free = copy.into, cast(Event, copy.after)
        fmt, slot = self._formats[copy.key.stored], self._next_slot()
        scales = self._scales.get(copy.key.stored, copies=self._copies)
        raw = (into if fmt.is_raw else slot.raw)[: fmt.stored.nbytes]
        copied = self._runtime.event(blocking=True)
        copy_start, copy_end = (self._runtime.event(timing=True) for _ in range(2))
        with self._runtime.on_stream(self._copies):
            if slot.used is not None:
                self._copies.wait_event(slot.used)
            # Only a copy into the buffer itself waits for the buffer. A copy into the raw slot runs ahead.
            if fmt.is_raw:
                self._copies.wait_event(free)
            copy_start.record(self._copies)
            copy_to_device(raw, stored)
            copied.record(self._copies)
            copy.release_source(copied.synchronize)
            if patch is not None:
                copy_to_device(slot.factors[: patch.layout.nbytes], patch.memory)
            copy_end.record(self._copies)
        start, ready = self._decode(copy, slot, scales, after=(copy_end, free))
        return PendingBlock(wait=self._wait_for(ready), copied=(copy_start, copy_end), decoded=(start, ready))
