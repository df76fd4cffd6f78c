"""A buffer: one fixed device allocation that holds exactly one block, and the states it goes through.

    EMPTY --begin_fill--> FILLING --issued--> ISSUED --acquire--> IN_USE --release(last=False)--> HELD --acquire--> ...
                             ^                                      |                               ^
                             |                                      +--release(last=True)--> DONE --+ keep
                             +------------------ begin_fill --------------------------------- |

A tenancy lasts from `begin_fill` (or `keep`) to `release(last=True)`. `end_run` closes whatever a cut-short run left
open. Every other order is a bug of ours and raises.
"""

from __future__ import annotations

from enum import Enum

import torch

from ..plan import BlockKey


class BufferState(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    ISSUED = "issued"
    IN_USE = "in use"
    HELD = "held"
    DONE = "done"


class BufferOrderError(RuntimeError):
    """A buffer was used out of order; names the buffer, its state and the call that was made."""


class BlockBuffer:
    """One buffer of the pool.

    `memory` is a 1-D uint8 tensor whose address is a multiple of 256; it never moves, so that views stay valid.
    """

    def __init__(self, index: int, memory: torch.Tensor) -> None:
        self.index = index
        self.memory = memory
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
        elif self.state is not BufferState.DONE:
            self.state, self.key = BufferState.EMPTY, None

    def _expect(self, call: str, *states: BufferState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise BufferOrderError(
                f"buffer {self.index} is {self.state.value} with {self.key}: {call} needs it to be {wanted}"
            )

    def _expect_key(self, call: str, key: BlockKey) -> None:
        if self.key != key:
            raise BufferOrderError(f"buffer {self.index} holds {self.key}: {call} asked for {key}")
