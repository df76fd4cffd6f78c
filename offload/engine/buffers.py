"""Buffers: fixed device allocations that hold exactly one block each, and their state machine.

    EMPTY --begin_fill--> FILLING --issued--> ISSUED --acquire--> IN_USE --release(last=False)--> IDLE --acquire--> ...
                             ^                                      |                               ^
                             |                                      +--release(last=True)--> DONE --+ keep
                             +------------------ begin_fill --------------------------------- |

    Between runs:  DONE --invalidate--> EMPTY --release_memory--> ABSENT --restore--> EMPTY

IDLE is the state of a resident block between two visits: it keeps its buffer, but nothing uses it. The lifetime of a
block lasts from `begin_fill` (or `keep`) to `release(last=True)`; `end_run` ends the lifetimes that an aborted run left
open. Every other transition is a bug and raises. RAM slots (`ram_slots.py`) have the same states.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch

from ...plan import BlockKey
from ...schema import StateError


class BufferState(Enum):
    """States of a buffer or RAM slot; see the diagram of this module."""

    ABSENT = "absent"
    EMPTY = "empty"
    FILLING = "filling"
    ISSUED = "issued"
    IN_USE = "in use"
    IDLE = "idle"
    DONE = "done"


class BlockStorage:
    """Storage for one block: its key and its state. `index` is its number in programs."""

    word = "place"

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = BufferState.EMPTY
        self.key: BlockKey | None = None

    def begin_fill(self, key: BlockKey) -> None:
        """Start the lifetime of a new block: the bytes of `key` are about to be copied in."""
        self._expect("begin_fill", BufferState.EMPTY, BufferState.DONE)
        self.state, self.key = BufferState.FILLING, key

    def issued(self) -> None:
        """Note that the copy was issued. A visit must order the compute stream behind it before it uses the block."""
        self._expect("issued", BufferState.FILLING)
        self.state = BufferState.ISSUED

    def keep(self, key: BlockKey) -> None:
        """Start the lifetime of a block that is still here from the last run."""
        self._expect("keep", BufferState.DONE)
        self._expect_key("keep", key)
        self.state = BufferState.IDLE

    def acquire(self, key: BlockKey) -> None:
        """Start a visit of `key`."""
        self._expect("acquire", BufferState.ISSUED, BufferState.IDLE)
        self._expect_key("acquire", key)
        self.state = BufferState.IN_USE

    def release(self, *, last: bool) -> None:
        """End a visit: its work was issued to the device. `last` ends the lifetime of the block."""
        self._expect("release", BufferState.IN_USE)
        self.state = BufferState.DONE if last else BufferState.IDLE

    def end_run(self) -> None:
        """End the run: keep a block that a visit has waited for, invalidate one that no visit has waited for."""
        if self.state in (BufferState.IN_USE, BufferState.IDLE):
            self.state = BufferState.DONE
        # Nothing has waited for these copies: after an error they may be incomplete, or may never have been issued.
        elif self.state in (BufferState.FILLING, BufferState.ISSUED):
            self.state, self.key = BufferState.EMPTY, None

    def invalidate(self) -> None:
        """Discard the contents: the next fetch of this block would bring other bytes."""
        self._expect("invalidate", BufferState.DONE)
        self.state, self.key = BufferState.EMPTY, None

    def _expect(self, call: str, *states: BufferState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise StateError(
                f"{self.word} {self.index} is {self.state.value} with {self.key}: {call} needs it to be {wanted}"
            )

    def _expect_key(self, call: str, key: BlockKey) -> None:
        if self.key != key:
            raise StateError(f"{self.word} {self.index} holds {self.key}, but {call} needs {key}")


class BlockBuffer(BlockStorage):
    """Buffer of the pool. Without `memory` it is absent until `restore`.

    The memory is 1-D uint8 whose address is a multiple of 256. It stays at this address until `release_memory`.
    `views` caches the parameters of each block that was bound to this buffer; they are dropped with the memory, so
    that nothing keeps it alive.
    """

    word = "buffer"

    def __init__(self, index: int, memory: torch.Tensor | None = None) -> None:
        super().__init__(index)
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
        """Current bytes of device memory."""
        return 0 if self._memory is None else self._memory.numel()

    def release_memory(self) -> int:
        """Release the memory and return its bytes. The device must have finished all work that uses it."""
        self._expect("release_memory", BufferState.EMPTY)
        nbytes = self.nbytes
        self.state, self._memory = BufferState.ABSENT, None
        self.views.clear()
        return nbytes

    def restore(self, memory: torch.Tensor) -> None:
        """Assign new, uninitialised memory."""
        self._expect("restore", BufferState.ABSENT)
        self.state, self._memory = BufferState.EMPTY, memory
