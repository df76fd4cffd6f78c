"""Slot memory interface: reserve the memory of a slot, read a block into it, drop it."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...plan import BlockKey


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Memory of one slot while its block is read. All tensors are 1-D uint8 with the stored bytes of the block."""

    memory: torch.Tensor
    """Memory of the slot, from which fetches copy."""
    view: torch.Tensor
    """Host memory to read the block into: `memory` itself, except for slots on a GPU."""
    needs_fill: bool
    """False if another rank has read the block already."""


class SlotMemory(Protocol):
    """Memory of slots. A slot is any hashable value; it has no memory until it is reserved.

    One thread reserves. No thread and no device may use a slot while it is reserved, dropped or closed.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of RAM in use, memory shared with other ranks included."""
        ...

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked RAM."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use."""
        ...

    def check_available(self, blocks: int, nbytes: int, *, available: int | None = None) -> None:
        """Refuse slots that would not fit into RAM, before the first of them is reserved.

        Args:
            blocks: number of blocks, for the error message.
            nbytes: bytes of all slots together, those in use included.
            available: bytes of RAM that can still be allocated; None: query the system.

        Raises:
            InsufficientRamError: not enough RAM is available; the message has both figures.
        """
        ...

    def reserve(
        self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0
    ) -> AbstractContextManager[Reservation]:
        """Reserve `nbytes` of memory for block `key`; the old contents of the slot are lost.

        If the reservation `needs_fill`, fill its `view` inside the `with` block. Leaving the block without an error
        makes the bytes valid, also for other ranks. After an error the contents of the slot are undefined, and it can
        be reserved again.

        Args:
            capacity: bytes to allocate if that is more than `nbytes`, for larger blocks that follow in the same slot.

        Raises:
            SourceError: the memory cannot be shared, or there is not enough RAM (`InsufficientRamError`).
            torch.OutOfMemoryError: the device has not enough memory.
        """
        ...

    def drop(self, slot: Hashable) -> int:
        """Free a slot and return the bytes of RAM that this releases: 0 if it is empty or shared with other ranks."""
        ...

    def release_shared(self) -> None:
        """Leave memory that is shared with other ranks, if no slot uses it; the next `reserve` joins again."""
        ...

    def close(self) -> None:
        """Free every slot. Slots can be reserved again."""
        ...
