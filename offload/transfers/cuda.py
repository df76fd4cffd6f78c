"""CUDA transfer backend: copy and decode streams, ordered with the compute stream by events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...devices import DeviceEvent
from ...plan import RAW_SLOTS, BlockKey
from ..formats.decode import decode_block
from ..formats.layout import BlockFormat, allocate_flat
from ..patches import StagedPatch, StagedPatches
from ..sources.base import BlockSource
from .base import PendingBlock, ReleaseSource


class DeviceScales:
    """Scales by block and parameter name, as the source gives them."""

    def __init__(self, source: BlockSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(scale.nbytes for block in list(self._scales.values()) for scale in block.values())

    def of(
        self, key: BlockKey, *, copies: torch.cuda.Stream, decodings: torch.cuda.Stream
    ) -> Mapping[str, torch.Tensor]:
        """The scales of a block, copied on the one stream if they are not there yet, for use on the other."""
        if key not in self._scales:
            scales = self._source.scales(key)
            with torch.cuda.stream(copies):
                # A blocking copy would wait for the copy stream, and with it for the visits that stream waits for.
                there = {n: scale.to(self._device, non_blocking=True) for n, scale in scales.items()}
            for scale in there.values():
                scale.record_stream(decodings)
            self._scales[key] = there
        return self._scales[key]

    def clear(self) -> None:
        """Let go of them; each is copied anew when it is asked for."""
        self._scales.clear()


class RawSlot:
    """Device memory for the bytes of one block that has to be decoded or patched, and for the factors of its patch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.raw = allocate_flat(0, device)
        self.factors = allocate_flat(0, device)
        self.used: torch.cuda.Event | None = None  # the decoding that read it last

    @property
    def nbytes(self) -> int:
        return self.raw.numel() + self.factors.numel()

    def fit(self, raw: int, factors: int) -> None:
        """Have exactly this much memory; what it held is lost."""
        if self.raw.numel() != raw:
            self.raw = allocate_flat(0, self._device)  # the old memory goes before the new one comes
            self.raw = allocate_flat(raw, self._device)
        if self.factors.numel() != factors:
            self.factors = allocate_flat(0, self._device)
            self.factors = allocate_flat(factors, self._device)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.raw.record_stream(stream)
        self.factors.record_stream(stream)


class CudaStreams:
    """A stream that copies and one that decodes and patches, beside the computing one; their order is by events only.

    Bytes that are not to be changed are copied straight into their buffer. Others are copied into one of two raw slots,
    which waits for the decoding of two fetches before, and never for the buffer: so the bus goes on while blocks are
    decoded. A run may compute on another stream than the run before it, and than the one that the buffers were
    allocated on.
    """

    def __init__(
        self,
        source: BlockSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        *,
        device: torch.device,
    ) -> None:
        self._formats = formats
        self._patches = patches
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._decodings = torch.cuda.Stream(device)
        self._largest_raw = max((fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw), default=0)
        self._raw_slots = [RawSlot(device) for _ in range(RAW_SLOTS)]
        self._turn = 0
        self._scales = DeviceScales(source, device)
        self._fit_slots()
        # Fresh memory may still be used by earlier work of the stream that it was allocated on.
        self._copies.wait_stream(torch.cuda.current_stream(device))

    def begin_run(self) -> None:
        current = torch.cuda.current_stream(self._device)
        # What a buffer kept was waited for by the stream that computed then. And the first copy into a buffer waits for
        # this stream, behind what a run that was cut short left under way there.
        current.wait_stream(self._copies)
        current.wait_stream(self._decodings)
        self._fit_slots()
        self._copies.wait_stream(current)  # also the copies into raw slots, which wait for no visit

    def land(
        self,
        key: BlockKey,
        stored: torch.Tensor | None,
        into: torch.Tensor,
        after: DeviceEvent,
        leave: ReleaseSource,
    ) -> PendingBlock:
        assert stored is not None, f"{key} cannot be read straight into device memory"
        patch = self._patches.get(key)
        free = cast(torch.cuda.Event, after)
        if patch is None and self._formats[key].is_raw:
            return self._copied(stored, into, free, leave)
        return self._decoded(key, stored, into, free, leave, patch)

    def _copied(
        self, stored: torch.Tensor, into: torch.Tensor, free: torch.cuda.Event, leave: ReleaseSource
    ) -> PendingBlock:
        began = torch.cuda.Event(enable_timing=True)
        copied = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(free)
            began.record(self._copies)
            into[: stored.numel()].copy_(stored, non_blocking=True)
            copied.record(self._copies)
        # Should the engine be dropped unclosed, this memory is not given to anybody else before the copies have ended.
        into.record_stream(self._copies)
        leave(copied.synchronize)
        return PendingBlock(
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(copied), copied=(began, copied)
        )

    def _decoded(
        self,
        key: BlockKey,
        stored: torch.Tensor,
        into: torch.Tensor,
        free: torch.cuda.Event,
        leave: ReleaseSource,
        patch: StagedPatch | None,
    ) -> PendingBlock:
        fmt = self._formats[key]
        slot = self._raw_slots[self._turn % RAW_SLOTS]
        self._turn += 1
        scales = self._scales.of(key, copies=self._copies, decodings=self._decodings)
        raw = (into if fmt.is_raw else slot.raw)[: stored.numel()]
        copied = torch.cuda.Event(blocking=True)
        starts, complete, began, ready = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        with torch.cuda.stream(self._copies):
            if slot.used is not None:
                self._copies.wait_event(slot.used)
            if fmt.is_raw:
                self._copies.wait_event(free)
            starts.record(self._copies)
            raw.copy_(stored, non_blocking=True)
            copied.record(self._copies)
            leave(copied.synchronize)
            if patch is not None:
                slot.factors[: patch.layout.nbytes].copy_(patch.memory, non_blocking=True)
            complete.record(self._copies)
        with torch.cuda.stream(self._decodings):
            self._decodings.wait_event(complete)
            self._decodings.wait_event(free)
            began.record(self._decodings)
            if not fmt.is_raw:
                decode_block(raw, into, fmt, scales)
            if patch is not None:
                patch.add_to(into, fmt.computed, slot.factors)
            ready.record(self._decodings)
        slot.used = ready
        for stream in (self._copies, self._decodings):
            into.record_stream(stream)
            slot.record_stream(stream)
        return PendingBlock(
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(ready),
            copied=(starts, complete),
            decoded=(began, ready),
        )

    def _fit_slots(self) -> None:
        # By the computing thread, before the copy stream waits for that thread's stream: fresh memory may still be used
        # by earlier work there.
        for slot in self._raw_slots:
            slot.fit(self._largest_raw, self._patches.largest)

    def end_run(self) -> None:
        # Whatever comes next, `close` too, comes after the last visits.
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def device_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._raw_slots) + self._scales.nbytes

    def settle(self) -> None:
        self._copies.synchronize()
        self._decodings.synchronize()

    def give_back(self) -> int:
        nbytes = self.device_bytes
        for slot in self._raw_slots:
            slot.fit(0, 0)
        self._scales.clear()
        return nbytes

    def close(self) -> None:
        self.settle()
        self.give_back()
