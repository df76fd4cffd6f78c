"""Slots of RAM that hold one block each: homes of blocks, and places through which blocks pass on to a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...devices import available_bytes
from ...plan import BlockKey
from ..formats.layout import host_bytes
from ..sources.base import NoRamError
from .page_lock import LockedBlocks, PageLock
from .pages import in_pages, map_memory
from .shared_segment import SharedSegment

FEWER = "keep fewer blocks in RAM, stream from the file instead, or close what else takes RAM"


class SlotMemory(Protocol):
    """The memory of slots by number; see `HostSlots` for each method."""

    @property
    def nbytes(self) -> int: ...

    @property
    def locked_bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    def check_room(self, blocks: int, nbytes: int, *, available: int | None = None) -> None: ...

    def fill(
        self,
        slot: int,
        key: BlockKey,
        nbytes: int,
        read: Callable[[torch.Tensor], None],
        *,
        room: int | None = None,
    ) -> torch.Tensor: ...

    def drop(self, slot: int) -> int: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Slot:
    memory: torch.Tensor
    shared: bool


class HostSlots:
    """Slots by number. Each takes exactly the memory its block needs, from its first `fill` until `drop` or `close`.

    One thread fills; nobody may read a slot while it is filled, dropped or closed, a device neither.

    Args:
        lock: locks the pages of slots, so that a device copies out of them by itself; None for ordinary memory.
        shared: memory that the ranks of one machine hold together. A block that has a place there is read by one rank
            and found there by all others.
    """

    device_bytes = 0

    def __init__(self, *, lock: PageLock | None, shared: SharedSegment | None = None) -> None:
        self._slots: dict[int, _Slot] = {}
        self._locked = LockedBlocks(lock) if lock is not None else None
        self._shared = shared

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that the slots take now, blocks that are shared included."""
        return sum(in_pages(slot.memory.numel()) for slot in list(self._slots.values()))

    @property
    def locked_bytes(self) -> int:
        """Those of them that are page-locked."""
        return 0 if self._locked is None else self._locked.nbytes

    def check_room(self, blocks: int, nbytes: int, *, available: int | None = None) -> None:
        """Refuse slots that would not fit into RAM, before the first of them is filled.

        Args:
            blocks: how many blocks the slots are for; told to the user.
            nbytes: what all slots will take together, those that are there already included.
            available: bytes of RAM that can still be taken; asked of the system if None.

        Raises:
            NoRamError: more RAM is needed than is available; says how much of each.
        """
        there = self.nbytes if self._shared is None else max(self.nbytes, self._shared.filled_bytes)
        room = (available_bytes() if available is None else available) + there
        if nbytes > room:
            raise NoRamError(
                f"{nbytes / 1e9:.1f} GB of RAM for {blocks} blocks, {room / 1e9:.1f} GB are available: {FEWER}"
            )

    def fill(
        self,
        slot: int,
        key: BlockKey,
        nbytes: int,
        read: Callable[[torch.Tensor], None],
        *,
        room: int | None = None,
    ) -> torch.Tensor:
        """Return the `nbytes` of `slot`, 1-D uint8, filled by `read`; the former content of the slot is lost.

        Memory is mapped here if the slot has none or too little: exactly `room` bytes (default `nbytes`), in whole
        pages. Its pages are locked once they are filled: the driver would fault untouched pages in one by one.

        Raises:
            NoRamError: the system does not give that much memory.
            SourceError: `read` raised it. After either the slot holds anything, and can be filled again.
        """
        if self._shared is not None and key in self._shared:
            memory = self._shared.fill(key, read)
            assert memory.numel() == nbytes, f"{key} has {memory.numel()} shared bytes, {nbytes} are wanted"
            self._keep(slot, _Slot(memory=memory, shared=True))
        else:
            memory = self._own(slot, max(nbytes, room or 0))
            read(memory[:nbytes])
        if self._locked is not None:
            _touch(memory, nbytes)
            self._locked.add(memory)
        return memory[:nbytes]

    def drop(self, slot: int) -> int:
        """Unlock and unmap a slot; returns the bytes it gives back: none if it is empty, or other ranks share them."""
        held = self._slots.pop(slot, None)
        if held is None:
            return 0
        if self._locked is not None:
            self._locked.remove(held.memory)
        return 0 if held.shared else in_pages(held.memory.numel())

    def rest(self) -> None:
        """No slot is in use: give up what ranks share, until the next `fill`."""
        if self._shared is not None and not self._slots:
            self._shared.rest()

    def close(self) -> None:
        """Unlock and unmap every slot. The slots can be filled again; shared memory belongs to whoever made it."""
        for slot in list(self._slots):
            self.drop(slot)

    def _keep(self, slot: int, new: _Slot) -> None:
        held = self._slots.get(slot)
        if held is None or held.memory.data_ptr() != new.memory.data_ptr():
            self.drop(slot)
            self._slots[slot] = new

    def _own(self, slot: int, nbytes: int) -> torch.Tensor:
        held = self._slots.get(slot)
        if held is None or held.shared or held.memory.numel() < nbytes:
            self.drop(slot)  # first: both together may be more than there is
            del held
            self._slots[slot] = _Slot(memory=_map(nbytes), shared=False)
        return self._slots[slot].memory


def _map(nbytes: int) -> torch.Tensor:
    available = available_bytes()
    if nbytes > available:
        raise NoRamError(
            f"{nbytes / 1e9:.1f} GB of RAM for one block more, {available / 1e9:.1f} GB are available: {FEWER}"
        )
    try:
        return map_memory(nbytes)[:nbytes]
    except OSError as err:
        raise NoRamError(f"{nbytes / 1e9:.1f} GB of RAM for a block are refused ({err.strerror}): {FEWER}") from err


def _touch(memory: torch.Tensor, filled: int) -> None:
    # The pages behind a block that is smaller than its slot.
    host_bytes(memory)[in_pages(filled) :: mmap.PAGESIZE] = 0
