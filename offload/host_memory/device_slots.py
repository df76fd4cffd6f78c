"""Slots in device memory for shards that are read once and stay on the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from ...devices import runtime_for
from ...plan.programs import BlockKey
from ..core.pages import PageLock, copy_to_device, in_pages, map_memory
from ..formats.layout import allocate_flat
from .base import Reservation, SlotMemory


class DeviceSlots(SlotMemory):
    """Slot memory on a device, each slot exactly as large as its shard.

    On a GPU every shard passes through one buffer in host memory, which is kept.

    Args:
        device: device for the slots.
        lock: page-locks the host buffer. None for pageable memory.
    """

    def __init__(self, device: torch.device, *, lock: PageLock | None) -> None:
        super().__init__(lock)
        self._device = device
        self._slots: dict[Hashable, torch.Tensor] = {}
        self._host_buffer: torch.Tensor | None = None
        self._runtime = runtime_for(device)
        self._copies = None if self._runtime is None else self._runtime.stream()

    @property
    def nbytes(self) -> int:
        """RAM now in bytes: the host buffer."""
        if self._host_buffer is None:
            return 0
        return in_pages(self._host_buffer.numel())

    @property
    def device_bytes(self) -> int:
        """Device memory now, in bytes."""
        return sum(memory.numel() for memory in list(self._slots.values()))

    @contextmanager
    def reserve(
        self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0
    ) -> Iterator[Reservation]:
        """See `SlotMemory.reserve`. Allocates exactly `nbytes`."""
        if self._runtime is None or self._copies is None:
            memory = self._memory(slot, nbytes)
            yield Reservation(memory=memory, view=memory, needs_fill=True)
            return
        host_buffer = self._host_memory(nbytes)
        # Allocated on the copy stream too: memory freed on another stream may still be in use by
        # earlier work there.
        with self._runtime.on_stream(self._copies):
            memory = self._memory(slot, nbytes)
        yield Reservation(memory=memory, view=host_buffer, needs_fill=True)
        with self._runtime.on_stream(self._copies):
            copy_to_device(memory, host_buffer)
        # The read thread waits here before it overwrites the host buffer. It reads each shard once,
        # so no later pass waits.
        self._copies.synchronize()

    def drop(self, slot: Hashable) -> None:
        self._slots.pop(slot, None)

    def close(self) -> None:
        """Free all slots and the host buffer. The slots can be filled again."""
        self._slots.clear()
        self.locked.release()
        self._host_buffer = None

    def _memory(self, slot: Hashable, nbytes: int) -> torch.Tensor:
        if slot not in self._slots or self._slots[slot].numel() != nbytes:
            # Freed first, so the device never holds both.
            self._slots.pop(slot, None)
            self._slots[slot] = allocate_flat(nbytes, self._device)
        return self._slots[slot]

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        if self._host_buffer is None or self._host_buffer.numel() < nbytes:
            self.locked.release()
            self._host_buffer = map_memory(nbytes)
            # The memory is touched first: otherwise the driver would fault in the pages one by one.
            self._host_buffer.zero_()
            self.locked.add(self._host_buffer)
        return self._host_buffer[:nbytes]
