"""Staging: a few host slots through which stored bytes pass on their way from a file to a buffer."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch

from .layout import allocate_flat
from .progress import RunStopped


class StagingSlot:
    """One slot. `memory` is a 1-D uint8 host tensor; `drained` waits for the copy out of it that is still under way."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.drained: Callable[[], None] | None = None


class Staging:
    """`count` slots of `nbytes` each, handed out in the order in which they came back.

    Slots come back in the order of the fetches, so handing them out can wait but never block for ever.
    """

    def __init__(self, count: int, nbytes: int, *, pinned: bool) -> None:
        self._slots = [StagingSlot(_host_memory(nbytes, pinned=pinned)) for _ in range(count)]
        self._free: queue.SimpleQueue[StagingSlot | None] = queue.SimpleQueue()
        self.nbytes = count * nbytes

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


def _host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if not pinned:
        return allocate_flat(nbytes, torch.device("cpu"))
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
