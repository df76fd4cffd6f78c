"""Copying beside computing, on CUDA with a stream and events, on a CPU with the fetch thread itself.

Both devices answer the same two calls, made by the fetch thread for one fetch after the other:

* `stage(key)`: bring the stored bytes to where the copy can start from. May run while the buffer is still in use.
* `land(staged, buffer, after)`: the buffer is free once the device has passed `after`; issue the copy into it. Returns
  what the computing thread does once, before its first use of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from ..metrics import Mark
from ..plan import BlockKey
from .decode import decode_block
from .layout import BlockFormat, allocate_flat, host_bytes
from .page_lock import CudaPageLock
from .source import BlockSource
from .staging import Staging, StagingSlot


def _nothing() -> None:
    """Nothing is left to do."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is left to do when a block was issued: `wait` for its bytes, then `unpack` them where that is computing."""

    wait: Callable[[], object] = _nothing
    unpack: Callable[[], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Stored bytes of one block, ready to be copied; `memory` is None where they are read straight into the buffer."""

    key: BlockKey
    memory: torch.Tensor | None
    slot: StagingSlot | None = None


class Streams(Protocol):
    """Moves the blocks of one source to one device."""

    def begin_run(self) -> None:
        """A run begins (computing thread)."""

    def stage(self, key: BlockKey) -> Staged: ...

    def land(self, staged: Staged, into: torch.Tensor, after: Mark) -> Arrival: ...

    def stop(self) -> None:
        """Wake the fetch thread out of any wait."""

    def end_run(self) -> None:
        """The fetch thread has left, and every visit was given to the device (computing thread)."""

    def close(self) -> None:
        """Wait for what is still under way, then let go of all memory."""


class CpuStreams:
    """RAM buffers as the device. The fetch thread only reads and copies bytes; the computing thread decodes.

    torch arithmetic on the fetch thread would start a second pool of threads that fights the first one for the cores.
    """

    def __init__(self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], *, slots: int) -> None:
        self._source = source
        self._formats = formats
        staged = [fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw]
        self._staging = Staging(slots, max(staged)) if staged else None

    def begin_run(self) -> None:
        if self._staging is not None:
            self._staging.begin_run()

    def stage(self, key: BlockKey) -> Staged:
        held = self._source.host_block(key)
        fmt = self._formats[key]
        if held is not None or fmt.is_raw:
            return Staged(key=key, memory=held)
        assert self._staging is not None
        slot = self._staging.take()
        memory = slot.memory[: fmt.stored.nbytes]
        self._source.read_block(key, memory)
        return Staged(key=key, memory=memory, slot=slot)

    def land(self, staged: Staged, into: torch.Tensor, after: Mark) -> Arrival:
        fmt = self._formats[staged.key]
        if not fmt.is_raw:
            return self._decode_on_first_use(staged, into, fmt)
        target = into[: fmt.stored.nbytes]
        if staged.memory is None:
            self._source.read_block(staged.key, target)
        else:
            # numpy copies on this thread alone; torch would call its thread pool for it.
            np.copyto(host_bytes(target), host_bytes(staged.memory))
        return Arrival()

    def _decode_on_first_use(self, staged: Staged, into: torch.Tensor, fmt: BlockFormat) -> Arrival:
        scales = self._source.scales(staged.key)

        def decode() -> None:
            assert staged.memory is not None
            decode_block(staged.memory, into, fmt, scales)
            if staged.slot is not None and self._staging is not None:
                self._staging.give_back(staged.slot)

        return Arrival(unpack=decode)

    def stop(self) -> None:
        if self._staging is not None:
            self._staging.stop()

    def end_run(self) -> None:
        return

    def close(self) -> None:
        self._staging = None


class CudaStreams:
    """One copy stream beside the computing stream; the order between them is by events only.

    File bytes pass through pinned staging slots. A slot is waited for on the host until its own copy has left it.
    A run may compute on another stream than the run before it, and than the one that the buffers were allocated on.
    """

    def __init__(
        self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], *, slots: int, device: torch.device
    ) -> None:
        self._source = source
        self._formats = formats
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._slots = slots
        self._staging: Staging | None = None
        undecoded = [fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw]
        self._raw = allocate_flat(max(undecoded), device) if undecoded else None
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}
        # Fresh memory may still be used by earlier work of the stream that it was allocated on.
        self._copies.wait_stream(torch.cuda.current_stream(device))

    def begin_run(self) -> None:
        # What a buffer kept was waited for by the stream that computed then.
        torch.cuda.current_stream(self._device).wait_stream(self._copies)
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
        copied, ready = torch.cuda.Event(blocking=True), torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(cast(torch.cuda.Event, after))
            raw = into if self._raw is None or fmt.is_raw else self._raw
            raw[: fmt.stored.nbytes].copy_(staged.memory, non_blocking=True)
            copied.record(self._copies)
            if not fmt.is_raw:
                decode_block(raw[: fmt.stored.nbytes], into, fmt, scales)
            ready.record(self._copies)
        # Should the engine be dropped unclosed, this memory is not given to anybody else before the copies have ended.
        into.record_stream(self._copies)
        raw.record_stream(self._copies)
        if staged.slot is not None and self._staging is not None:
            staged.slot.drained = copied.synchronize
            self._staging.give_back(staged.slot)
        return Arrival(wait=lambda: torch.cuda.current_stream(self._device).wait_event(ready))

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

    def close(self) -> None:
        self._copies.synchronize()
        if self._staging is not None:
            self._staging.close()
        self._staging = self._raw = None
        self._scales.clear()


def streams_for(
    device: torch.device, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], *, slots: int
) -> Streams:
    """The streams of `device`; `slots` staging slots where the route needs staging."""
    if device.type == "cuda":
        return CudaStreams(source, formats, slots=slots, device=device)
    return CpuStreams(source, formats, slots=slots)
