"""Slot memory interface: reserve slot memory, read a block into it, drop it."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ...plan.programs import BlockKey
from ..core.pages import LockedBlocks, PageLock


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Slot memory while a block is read. All tensors are 1-D uint8 with the stored block bytes."""

    memory: torch.Tensor
    """Slot memory. Fetches copy from here."""
    view: torch.Tensor
    """Host memory to read the block into: `memory` itself, except for slots on a GPU."""
    needs_fill: bool
    """False if another rank has read the block already."""


class SlotMemory:
    """Memory for slots. A slot is any hashable value. It has no memory until it is reserved.

    Several threads reserve and lock slots in RAM, each another slot. One thread reserves device
    slots. No thread and no device may use a slot while it is reserved, dropped or closed.

    Args:
        lock: driver that page-locks memory, so devices copy from it asynchronously. None for
            ordinary memory.

    Attributes:
        locked: page-locked slot memory.
    """

    def __init__(self, lock: PageLock | None) -> None:
        self.locked = LockedBlocks(lock)

    @property
    def nbytes(self) -> int:
        """RAM in use in bytes, including memory shared with other ranks."""
        raise NotImplementedError

    @property
    def device_bytes(self) -> int:
        """Device memory in use, in bytes."""
        return 0

    def check_available(self, blocks: int, nbytes: int, *, available: int) -> None:
        """Refuse slots that would not fit into RAM, before the first one is reserved.

        Args:
            blocks: block count, for the error message.
            nbytes: bytes in all slots together, including slots in use.
            available: RAM that can still be allocated, in bytes.

        Raises:
            InsufficientRamError: not enough RAM is available. The message has both figures.
        """

    def reserve(
        self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0
    ) -> AbstractContextManager[Reservation]:
        """Reserve `nbytes` of memory for block `key`. The old slot contents are lost.

        If the reservation `needs_fill`, fill its `view` inside the `with` block. Leaving the block
        without an error makes the bytes valid, also for other ranks. After an error the slot
        contents are undefined, and it can be reserved again.

        Args:
            slot: the slot.
            key: block to be read into it.
            nbytes: stored block bytes.
            capacity: bytes to allocate if more than `nbytes`, for larger blocks that follow in the
                same slot.

        Raises:
            SourceError: the memory cannot be shared, or there is not enough RAM
                (`InsufficientRamError`).
            torch.OutOfMemoryError: the device has not enough memory.
        """
        raise NotImplementedError

    def lock(self, slot: Hashable, filled: int) -> bool:
        """Page-lock slot memory in place, after `reserve`. Return True if this call has locked it.

        Args:
            slot: the slot.
            filled: slot bytes written so far.
        """
        return False

    def drop(self, slot: Hashable) -> None:
        """Free a slot. Do nothing if it is empty."""
        raise NotImplementedError

    def release_shared(self) -> None:
        """Leave memory shared with other ranks, if no slot uses it.

        The next `reserve` joins again.
        """

    def close(self) -> None:
        """Free every slot. Slots can be reserved again. Memory shared with other ranks stays."""
        raise NotImplementedError
