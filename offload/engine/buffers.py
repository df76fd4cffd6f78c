"""A buffer: one fixed device allocation that holds exactly one block, and the states that a place for one goes through.

    EMPTY --begin_fill--> FILLING --issued--> ISSUED --acquire--> IN_USE --release(last=False)--> HELD --acquire--> ...
                             ^                                      |                               ^
                             |                                      +--release(last=True)--> DONE --+ keep
                             +------------------ begin_fill --------------------------------- |

    Between runs:  DONE --forget--> EMPTY --give_back--> ABSENT --restore--> EMPTY

A tenancy lasts from `begin_fill` (or `keep`) to `release(last=True)`. `end_run` closes whatever a cut-short run left
open. Every other order is a bug of ours and raises. A slot of RAM (`ram_slots.py`) goes through the same states.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from ...plan import BlockKey
from ...schema import StateError


class BufferState(Enum):
    ABSENT = "absent"
    EMPTY = "empty"
    FILLING = "filling"
    ISSUED = "issued"
    IN_USE = "in use"
    HELD = "held"
    DONE = "done"


class BlockPlace:
    """A place for one block: what lies in it, and how far it is. `index` is its number in programs."""

    word = "place"

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = BufferState.EMPTY
        self.key: BlockKey | None = None

    def begin_fill(self, key: BlockKey) -> None:
        """A new tenancy begins: the bytes of `key` are on their way."""
        self._expect("begin_fill", BufferState.EMPTY, BufferState.DONE)
        self.state, self.key = BufferState.FILLING, key

    def issued(self) -> None:
        """The copy was issued; whoever computes with the block has to wait for its arrival first."""
        self._expect("issued", BufferState.FILLING)
        self.state = BufferState.ISSUED

    def keep(self, key: BlockKey) -> None:
        """A new tenancy begins with what the buffer still holds from the run before."""
        self._expect("keep", BufferState.DONE)
        self._expect_key("keep", key)
        self.state = BufferState.HELD

    def acquire(self, key: BlockKey) -> None:
        """A visit starts to compute with `key`."""
        self._expect("acquire", BufferState.ISSUED, BufferState.HELD)
        self._expect_key("acquire", key)
        self.state = BufferState.IN_USE

    def release(self, *, last: bool) -> None:
        """The visit was given to the device; `last` ends the tenancy."""
        self._expect("release", BufferState.IN_USE)
        self.state = BufferState.DONE if last else BufferState.HELD

    def end_run(self) -> None:
        """The run is over. A block that was waited for is still whole; one that was not is forgotten."""
        if self.state in (BufferState.IN_USE, BufferState.HELD):
            self.state = BufferState.DONE
        elif self.state in (BufferState.FILLING, BufferState.ISSUED):
            self.state, self.key = BufferState.EMPTY, None

    def forget(self) -> None:
        """What it holds is not what its block arrives with any more."""
        self._expect("forget", BufferState.DONE)
        self.state, self.key = BufferState.EMPTY, None

    def _expect(self, call: str, *states: BufferState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise StateError(
                f"{self.word} {self.index} is {self.state.value} with {self.key}: {call} needs it to be {wanted}"
            )

    def _expect_key(self, call: str, key: BlockKey) -> None:
        if self.key != key:
            raise StateError(f"{self.word} {self.index} holds {self.key}: {call} asked for {key}")


class BlockBuffer(BlockPlace):
    """One buffer of the pool; without `memory` it is absent until `restore`.

    Its memory is 1-D uint8 whose address is a multiple of 256. It never moves until it is given back, and `views` go
    with it: what was made of the memory for each block, which nobody else keeps.
    """

    word = "buffer"

    def __init__(self, index: int, memory: torch.Tensor | None = None) -> None:
        super().__init__(index)
        self.views: dict[BlockKey, dict[str, nn.Parameter]] = {}
        self._memory = memory
        if memory is None:
            self.state = BufferState.ABSENT

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None, f"buffer {self.index} has no memory"
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes of device memory it takes now."""
        return 0 if self._memory is None else self._memory.numel()

    def give_back(self) -> int:
        """Let go of the memory, which the device has no more use for; returns its bytes."""
        self._expect("give_back", BufferState.EMPTY)
        nbytes = self.nbytes
        self.state, self._memory = BufferState.ABSENT, None
        self.views.clear()
        return nbytes

    def restore(self, memory: torch.Tensor) -> None:
        """It has memory again, which holds nothing yet."""
        self._expect("restore", BufferState.ABSENT)
        self.state, self._memory = BufferState.EMPTY, memory
