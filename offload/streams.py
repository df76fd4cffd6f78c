"""What the engine asks of a device: copying beside computing (`cpu_streams.py`, `cuda_streams.py`).

Both devices answer the same two calls, made by the fetch thread for one fetch after the other:

* `stage(key)`: bring the stored bytes to where the copy can start from. May run while the buffer is still in use.
* `land(staged, buffer, after)`: the buffer is free once the device has passed `after`; issue the copy into it. Returns
  what the computing thread does once, before its first use of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..metrics import Mark
from ..plan import BlockKey
from .staging import StagingSlot


def nothing_left() -> None:
    """Nothing is left to do."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is left to do when a block was issued: `wait` for its bytes, then `unpack` them where that is computing."""

    wait: Callable[[], object] = nothing_left
    unpack: Callable[[], None] = nothing_left


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Stored bytes of one block, ready to be copied; `memory` is None where they are read straight into the buffer."""

    key: BlockKey
    memory: torch.Tensor | None
    slot: StagingSlot | None = None


class Streams(Protocol):
    """Moves the blocks of one source to one device."""

    def begin_run(self) -> None:
        """A run begins (computing thread)."""

    def stage(self, key: BlockKey) -> Staged: ...

    def land(self, staged: Staged, into: torch.Tensor, after: Mark) -> Arrival: ...

    def stop(self) -> None:
        """Wake the fetch thread out of any wait."""

    def end_run(self) -> None:
        """The fetch thread has left, and every visit was given to the device (computing thread)."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory beside the buffers."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked host memory through which blocks pass."""

    def settle(self) -> None:
        """Between runs: wait until the device has passed everything that uses a buffer or a host block."""

    def give_back(self) -> int:
        """Let go of all device memory after `settle`; the next run makes it anew. Returns its bytes."""

    def close(self) -> None:
        """Wait for what is still under way, then let go of all memory."""
