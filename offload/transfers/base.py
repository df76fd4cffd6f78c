"""What the engine asks of a device: copying beside computing (`cpu.py`, `cuda.py`).

Both devices answer one call, made by the fetch thread for one fetch after the other: `land` brings the stored bytes of
a block out of a slot of RAM into its buffer, and returns what the computing thread does before its first use of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...devices import DeviceEvent
from ...plan import BlockKey


def nothing_left() -> None:
    """Nothing is left to do."""


class ReleaseSource(Protocol):
    """Called once, when the bytes were taken out of their slot."""

    def __call__(self, drained: Callable[[], object] | None = None) -> None:
        """`drained` waits on the host until the copy out of the slot has ended; None: it has ended."""


@dataclass(frozen=True, kw_only=True)
class PendingBlock:
    """What is left to do when a block was issued: `wait` for its bytes, then `unpack` them where that is computing.

    `copied` is when its copy out of RAM began and ended, None where there was none; `decoded` when the device began and
    ended to decode and patch, None where it does not, or `unpack` does it.
    """

    wait: Callable[[], object] = nothing_left
    unpack: Callable[[], None] | None = None
    copied: tuple[DeviceEvent, DeviceEvent] | None = None
    decoded: tuple[DeviceEvent, DeviceEvent] | None = None


class Streams(Protocol):
    """Moves the blocks of one source to one device."""

    def begin_run(self) -> None:
        """A run begins (computing thread)."""

    def land(
        self,
        key: BlockKey,
        stored: torch.Tensor | None,
        into: torch.Tensor,
        after: DeviceEvent,
        leave: ReleaseSource,
    ) -> PendingBlock:
        """The buffer `into` is free once the device has passed `after`; issue the copy into it (fetch thread).

        `stored` are the bytes in RAM; None: they were read straight into the buffer.
        """

    def end_run(self) -> None:
        """The fetch thread has left, and every visit was given to the device (computing thread)."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory beside the buffers."""

    def settle(self) -> None:
        """Between runs: wait until the device has passed everything that uses a buffer or a slot of RAM."""

    def give_back(self) -> int:
        """Let go of all device memory after `settle`; the next run makes it anew. Returns its bytes."""

    def close(self) -> None:
        """Wait for what is still under way, then let go of all memory."""
