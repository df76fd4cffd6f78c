"""Staging: a few host slots through which stored bytes pass on their way from a file to a buffer."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch

from .host_memory import in_pages, map_memory
from .page_lock import LockedBlocks, PageLock
from .progress import RunStopped


class StagingSlot:
    """One slot. `memory` is a 1-D uint8 host tensor; `drained` waits for the copy out of it that is still under way."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.drained: Callable[[], None] | None = None


class Staging:
    """`count` slots of `nbytes` each, page-locked by `lock`, handed out in the order in which they came back.

    Slots share no page. They come back in the order of the fetches, so handing them out can wait but never block for
    ever.
    """

    def __init__(self, count: int, nbytes: int, *, lock: PageLock | None = None) -> None:
        stride = in_pages(nbytes)
        memory = map_memory(count * stride)
        self._slots = [StagingSlot(memory[start : start + nbytes]) for start in range(0, count * stride, stride)]
        self._free: queue.SimpleQueue[StagingSlot | None] = queue.SimpleQueue()
        self._locked = LockedBlocks(lock) if lock is not None else None
        if self._locked is not None:
            for slot in self._slots:
                self._locked.add(slot.memory)

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return 0 if self._locked is None else self._locked.nbytes

    def begin_run(self) -> None:
        """Every slot is free again; whatever an interrupted run left behind is dropped."""
        self._free = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    def stop(self) -> None:
        """Wake a taker that waits for a slot; it raises `RunStopped`."""
        self._free.put(None)

    def take(self) -> StagingSlot:
        """The next free slot, whose former content has left it."""
        slot = self._free.get()
        if slot is None:
            raise RunStopped
        if slot.drained is not None:
            slot.drained()
            slot.drained = None
        return slot

    def give_back(self, slot: StagingSlot) -> None:
        self._free.put(slot)

    def close(self) -> None:
        """Give the memory back. No copy out of it may be under way."""
        if self._locked is not None:
            self._locked.release()
        self._slots.clear()
