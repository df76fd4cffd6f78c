"""Slots in device memory for shards that are read once and stay on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan import BlockKey
from ..formats.layout import allocate_flat
from ..host_memory.page_lock import LockedBlocks, PageLock
from ..host_memory.pages import in_pages, map_memory


class DeviceSlots:
    """Slots by number, each exactly as large as its shard, allocated from its first `fill` until `drop` or `close`.

    On a GPU every `fill` passes through one host memory buffer, which is kept. Only one thread may call `fill`, and no
    thread may read a slot while it is filled or dropped.

    Args:
        device: the device of the slots.
        lock: page-locks the host memory buffer; None for pageable memory.
    """

    def __init__(self, device: torch.device, *, lock: PageLock | None) -> None:
        self._device = device
        self._slots: dict[int, torch.Tensor] = {}
        self._host_buffer: torch.Tensor | None = None
        self._locked = LockedBlocks(lock) if lock is not None else None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Current bytes of RAM: those of the host memory buffer."""
        return 0 if self._host_buffer is None else in_pages(self._host_buffer.numel())

    @property
    def device_bytes(self) -> int:
        """Current bytes of device memory."""
        return sum(memory.numel() for memory in list(self._slots.values()))

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return 0 if self._locked is None else self._locked.nbytes

    def check_room(self, blocks: int, nbytes: int, *, available: int | None = None) -> None:
        """Accept everything: `fill` raises if the device is out of memory."""

    def fill(
        self,
        slot: int,
        key: BlockKey,
        nbytes: int,
        read: Callable[[torch.Tensor], None],
        *,
        room: int | None = None,
    ) -> torch.Tensor:
        """Return the `nbytes` of `slot`, 1-D uint8 on the device, filled by `read`; its former contents are lost.

        Raises:
            OutOfMemoryError: the device is out of memory.
            OSError: `read` raised it, or there is not enough host memory; the slot can be filled again.
        """
        if self._copies is None:
            read(self._memory(slot, nbytes))
            return self._slots[slot]
        host_buffer = self._host_memory(nbytes)
        read(host_buffer)
        # Allocated on the copy stream too: memory freed by another stream may still be in use by earlier work there.
        with torch.cuda.stream(self._copies):
            self._memory(slot, nbytes).copy_(host_buffer, non_blocking=True)
        # The read thread waits here before it overwrites the host buffer. It reads each shard once, so no later pass
        # waits for it.
        self._copies.synchronize()
        return self._slots[slot]

    def drop(self, slot: int) -> int:
        """Free a slot and return the bytes of RAM that this frees: none."""
        self._slots.pop(slot, None)
        return 0

    def rest(self) -> None:
        """Do nothing: these slots are not shared between ranks."""

    def close(self) -> None:
        """Free all slots and the host memory buffer. The slots can be filled again."""
        self._slots.clear()
        if self._locked is not None:
            self._locked.release()
        self._host_buffer = None

    def _memory(self, slot: int, nbytes: int) -> torch.Tensor:
        if slot not in self._slots or self._slots[slot].numel() != nbytes:
            self._slots.pop(slot, None)
            self._slots[slot] = allocate_flat(nbytes, self._device)
        return self._slots[slot]

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        if self._host_buffer is None or self._host_buffer.numel() < nbytes:
            if self._locked is not None:
                self._locked.release()
            self._host_buffer = map_memory(nbytes)
            self._host_buffer.zero_()
            if self._locked is not None:
                self._locked.add(self._host_buffer)
        return self._host_buffer[:nbytes]
