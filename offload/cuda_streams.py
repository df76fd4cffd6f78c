"""Copying beside computing on CUDA: a stream of its own, and events between it and the stream that computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ..metrics import Mark
from ..plan import BlockKey
from .decode import decode_block
from .layout import BlockFormat, allocate_flat
from .page_lock import CudaPageLock
from .patches import HeldPatches
from .source import BlockSource
from .staging import Staging
from .streams import Arrival, Staged


class CudaStreams:
    """One copy stream beside the computing stream; the order between them is by events only.

    File bytes pass through pinned staging slots. A slot is waited for on the host until its own copy has left it.
    Undecoded bytes and the factors of patches each have one slot on the device, whose uses the copy stream keeps apart.
    A run may compute on another stream than the run before it, and than the one that the buffers were allocated on.
    """

    def __init__(
        self,
        source: BlockSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: HeldPatches,
        *,
        slots: int,
        device: torch.device,
    ) -> None:
        self._source = source
        self._formats = formats
        self._patches = patches
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._slots = slots
        self._staging: Staging | None = None
        self._largest_raw = max((fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw), default=0)
        self._raw = allocate_flat(self._largest_raw, device)
        self._factors = allocate_flat(0, device)
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}
        # Fresh memory may still be used by earlier work of the stream that it was allocated on.
        self._copies.wait_stream(torch.cuda.current_stream(device))

    def begin_run(self) -> None:
        # What a buffer kept was waited for by the stream that computed then.
        torch.cuda.current_stream(self._device).wait_stream(self._copies)
        self._fit_slots()
        if self._staging is not None:
            self._staging.begin_run()

    def stage(self, key: BlockKey) -> Staged:
        held = self._source.host_block(key)
        if held is not None:
            return Staged(key=key, memory=held)
        slot = self._file_staging().take()
        memory = slot.memory[: self._formats[key].stored.nbytes]
        self._source.read_block(key, memory)
        return Staged(key=key, memory=memory, slot=slot)

    def land(self, staged: Staged, into: torch.Tensor, after: Mark) -> Arrival:
        assert staged.memory is not None
        fmt = self._formats[staged.key]
        scales = self._device_scales(staged.key)
        patch = self._patches.get(staged.key)
        copied, ready = torch.cuda.Event(blocking=True), torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(cast(torch.cuda.Event, after))
            raw = into if fmt.is_raw else self._raw
            raw[: fmt.stored.nbytes].copy_(staged.memory, non_blocking=True)
            copied.record(self._copies)
            if not fmt.is_raw:
                decode_block(raw[: fmt.stored.nbytes], into, fmt, scales)
            if patch is not None:
                self._factors[: patch.layout.nbytes].copy_(patch.memory, non_blocking=True)
                self._factors.record_stream(self._copies)
                patch.add_to(into, fmt.computed, self._factors)
            ready.record(self._copies)
        # Should the engine be dropped unclosed, this memory is not given to anybody else before the copies have ended.
        into.record_stream(self._copies)
        raw.record_stream(self._copies)
        if staged.slot is not None and self._staging is not None:
            staged.slot.drained = copied.synchronize
            self._staging.give_back(staged.slot)
        return Arrival(wait=lambda: torch.cuda.current_stream(self._device).wait_event(ready))

    def _fit_slots(self) -> None:
        # By the computing thread, before the mark that the first copies of a run wait for: fresh memory may still be
        # used by earlier work of that thread's stream.
        if self._raw.numel() != self._largest_raw:
            self._raw = allocate_flat(self._largest_raw, self._device)
        if self._factors.numel() != self._patches.largest:
            self._factors = allocate_flat(0, self._device)  # the old slot goes before the new one comes
            self._factors = allocate_flat(self._patches.largest, self._device)

    def _file_staging(self) -> Staging:
        # Only a block that comes from a file needs pinned slots, and only then are they paid for.
        if self._staging is None:
            largest = max(fmt.stored.nbytes for fmt in self._formats.values())
            self._staging = Staging(self._slots, largest, lock=CudaPageLock(self._device))
            self._staging.begin_run()
        return self._staging

    def _device_scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        if key not in self._scales:
            scales = self._source.scales(key)
            with torch.cuda.stream(self._copies):
                # A blocking copy would wait for the copy stream, and with it for the visits that stream waits for.
                self._scales[key] = {n: scale.to(self._device, non_blocking=True) for n, scale in scales.items()}
        return self._scales[key]

    def stop(self) -> None:
        if self._staging is not None:
            self._staging.stop()

    def end_run(self) -> None:
        # Whatever comes next, `close` too, comes after the last visits.
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def device_bytes(self) -> int:
        scales = sum(scale.nbytes for block in list(self._scales.values()) for scale in block.values())
        return self._raw.numel() + self._factors.numel() + scales

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.locked_bytes

    def settle(self) -> None:
        self._copies.synchronize()

    def give_back(self) -> int:
        nbytes = self.device_bytes
        self._raw = self._factors = allocate_flat(0, self._device)
        self._scales.clear()
        return nbytes

    def close(self) -> None:
        self.settle()
        if self._staging is not None:
            self._staging.close()
        self._staging = None
        self.give_back()
