"""Slots in device memory: homes of shards that are read once and then never leave the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from ...plan import BlockKey
from ..formats.layout import allocate_flat
from ..host_memory.base import Reservation
from ..host_memory.page_lock import LockedBlocks, PageLock
from ..host_memory.pages import in_pages, map_memory


class DeviceSlots:
    """Slots by number, each exactly as large as what it holds, from its first `reserve` until `drop` or `close`.

    On a GPU every `reserve` passes through one piece of host memory, which is kept. One thread fills; nobody may read a
    slot while it is filled or dropped.

    Args:
        device: where the slots are.
        lock: locks the pages of that piece; None for ordinary memory.
    """

    def __init__(self, device: torch.device, *, lock: PageLock | None) -> None:
        self._device = device
        self._slots: dict[Hashable, torch.Tensor] = {}
        self._passage: torch.Tensor | None = None
        self._locked = LockedBlocks(lock) if lock is not None else None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that the piece of host memory takes now."""
        return 0 if self._passage is None else in_pages(self._passage.numel())

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the slots take now."""
        return sum(memory.numel() for memory in list(self._slots.values()))

    @property
    def locked_bytes(self) -> int:
        """Bytes of host memory that are page-locked."""
        return 0 if self._locked is None else self._locked.nbytes

    def check_available(self, blocks: int, nbytes: int, *, available: int | None = None) -> None:
        """Nothing is refused before: device memory that is short is told by the device."""

    @contextmanager
    def reserve(self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0) -> Iterator[Reservation]:
        if self._copies is None:
            memory = self._memory(slot, nbytes)
            yield Reservation(memory=memory, view=memory, needs_fill=True)
            return
        passage = self._host_memory(nbytes)
        # Allocated on this stream too: memory that another one has freed may still be used by earlier work there.
        with torch.cuda.stream(self._copies):
            memory = self._memory(slot, nbytes)
        yield Reservation(memory=memory, view=passage, needs_fill=True)
        with torch.cuda.stream(self._copies):
            memory.copy_(passage, non_blocking=True)
        self._copies.synchronize()  # by the thread that reads, for which nobody waits on a later pass

    def drop(self, slot: Hashable) -> int:
        """Free a slot; returns the bytes of RAM it gives back, which are none."""
        self._slots.pop(slot, None)
        return 0

    def release_shared(self) -> None:
        """Nothing is shared."""

    def close(self) -> None:
        """Free every slot and the piece of host memory. The slots can be filled again."""
        self._slots.clear()
        if self._locked is not None:
            self._locked.release()
        self._passage = None

    def _memory(self, slot: Hashable, nbytes: int) -> torch.Tensor:
        if slot not in self._slots or self._slots[slot].numel() != nbytes:
            self._slots.pop(slot, None)
            self._slots[slot] = allocate_flat(nbytes, self._device)
        return self._slots[slot]

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        if self._passage is None or self._passage.numel() < nbytes:
            if self._locked is not None:
                self._locked.release()
            self._passage = map_memory(nbytes)
            self._passage.zero_()
            if self._locked is not None:
                self._locked.add(self._passage)
        return self._passage[:nbytes]
