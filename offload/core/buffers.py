"""Buffers: fixed device allocations for exactly one block each, and their state machine.

    EMPTY --begin_fill--> FILLING --issued--> ISSUED --acquire--> IN_USE

    IN_USE --release(last=False)--> IDLE --acquire--> IN_USE
    IN_USE --release(last=True)--> DONE --begin_fill--> FILLING
    DONE --keep--> IDLE

    Between runs:  DONE --invalidate--> EMPTY --release_memory--> ABSENT --restore--> EMPTY

A resident block is IDLE between two visits: it keeps the buffer, but nothing uses it. A block's
lifetime lasts from `begin_fill` (or `keep`) to `release(last=True)`. `end_run` ends lifetimes left
open by an aborted run. Every other transition is a bug and raises. RAM slots (`ram_slots.py`) have
the same states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import torch

from ...plan.programs import BlockKey
from ...schema import StateError


class BufferState(Enum):
    """States of a buffer or RAM slot. See the diagram in this module."""

    ABSENT = "absent"
    EMPTY = "empty"
    FILLING = "filling"
    ISSUED = "issued"
    IN_USE = "in use"
    IDLE = "idle"
    DONE = "done"


class BlockStorage:
    """Storage for one block, with its key and state. `index` is the number in programs."""

    word = "place"

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = BufferState.EMPTY
        self.key: BlockKey | None = None

    def begin_fill(self, key: BlockKey) -> None:
        """Start a new block's lifetime. The caller copies the bytes of `key` next."""
        self._expect("begin_fill", BufferState.EMPTY, BufferState.DONE)
        self.state = BufferState.FILLING
        self.key = key

    def issued(self) -> None:
        """Mark the copy as issued.

        Before a visit uses the block, it must order the compute stream behind the copy.
        """
        self._expect("issued", BufferState.FILLING)
        self.state = BufferState.ISSUED

    def keep(self, key: BlockKey) -> None:
        """Start the lifetime of a block left here by the last run."""
        self._expect("keep", BufferState.DONE)
        self._expect_key("keep", key)
        self.state = BufferState.IDLE

    def acquire(self, key: BlockKey) -> None:
        """Start a visit of `key`."""
        self._expect("acquire", BufferState.ISSUED, BufferState.IDLE)
        self._expect_key("acquire", key)
        self.state = BufferState.IN_USE

    def release(self, *, last: bool) -> None:
        """End a visit whose work was issued to the device. `last` ends the block's lifetime."""
        self._expect("release", BufferState.IN_USE)
        self.state = BufferState.DONE if last else BufferState.IDLE

    def end_run(self) -> None:
        """End the run: keep a block some visit has waited for, invalidate any other."""
        if self.state in (BufferState.IN_USE, BufferState.IDLE):
            self.state = BufferState.DONE
        # Nothing has waited for these copies. After an error they may be incomplete, or never
        # issued.
        elif self.state in (BufferState.FILLING, BufferState.ISSUED):
            self.state = BufferState.EMPTY
            self.key = None

    def invalidate(self) -> None:
        """Discard the contents, because the next fetch of this block would bring other bytes."""
        self._expect("invalidate", BufferState.DONE)
        self.state = BufferState.EMPTY
        self.key = None

    def _expect(self, call: str, *states: BufferState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise StateError(
                f"{self.word} {self.index} is {self.state.value} with {self.key}: {call} needs it "
                f"to be {wanted}"
            )

    def _expect_key(self, call: str, key: BlockKey) -> None:
        if self.key != key:
            raise StateError(f"{self.word} {self.index} holds {self.key}, but {call} needs {key}")


def contents(storages: Iterable[BlockStorage]) -> dict[int, BlockKey]:
    """Return the blocks left from the last run, by index. A new program may keep them."""
    done = (each for each in storages if each.state is BufferState.DONE)
    return {each.index: each.key for each in done if each.key is not None}


class BlockBuffer(BlockStorage):
    """Buffer in the pool. Without `memory` it is absent until `restore`.

    The memory is 1-D uint8. Its address is a multiple of 256 and does not change until
    `release_memory`. `views` caches the parameters of each block bound to this buffer. They are
    dropped with the memory, so nothing keeps it alive.

    Attributes:
        capacity: size of the largest block for this buffer, in bytes.
    """

    word = "buffer"

    def __init__(
        self, index: int, memory: torch.Tensor | None = None, *, capacity: int = 0
    ) -> None:
        super().__init__(index)
        self.capacity = capacity
        self.views: dict[BlockKey, Mapping[str, torch.Tensor]] = {}
        self._memory = memory
        if memory is None:
            self.state = BufferState.ABSENT

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None, f"buffer {self.index} has no memory"
        return self._memory

    @property
    def nbytes(self) -> int:
        """Device bytes now."""
        if self._memory is None:
            return 0
        return self._memory.numel()

    def release_memory(self) -> int:
        """Release the memory and return the freed bytes.

        The device must have finished all work that uses it.
        """
        self._expect("release_memory", BufferState.EMPTY)
        nbytes = self.nbytes
        self.state = BufferState.ABSENT
        self._memory = None
        self.views.clear()
        return nbytes

    def restore(self, memory: torch.Tensor) -> None:
        """Assign new, uninitialised memory."""
        self._expect("restore", BufferState.ABSENT)
        self.state = BufferState.EMPTY
        self._memory = memory
