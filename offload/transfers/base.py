"""Interface of the transfer backends: asynchronous copies of blocks into buffers (`cpu.py`, `cuda.py`).

The fetch thread calls `copy_in` for one fetch after the other. Each call issues the copy of a block from its RAM slot
into its buffer and returns a `PendingBlock`, which the compute thread finishes before it uses the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...devices import DeviceEvent
from ...plan import BlockKey
from ..formats.layout import BlockFormat
from ..host_memory.pages import HostBlock, ScatteredBlock
from ..patches import StagedPatches
from ..sources.base import BlockSource


def no_op() -> None:
    """Do nothing."""


class ReleaseSource(Protocol):
    """Callback that releases the RAM slot of a fetch; a backend calls it once per fetch that has a slot."""

    def __call__(self, drained: Callable[[], object] | None = None) -> None:
        """Release the slot.

        Args:
            drained: blocks the host until the copy out of the slot has finished; None: the copy has finished.
        """


class BlockCopy(NamedTuple):
    """Copy of one block from its RAM slot into its buffer."""

    key: BlockKey
    stored: HostBlock | None
    """Block bytes in RAM. None if read directly into the buffer. Scattered only for `CudaBackend`."""
    into: torch.Tensor
    """The buffer, 1-D uint8. It is free once the device has passed `after`."""
    after: DeviceEvent
    """End of the last visit that read the buffer."""
    release_source: ReleaseSource
    """Called once `stored` is no longer needed."""

    @property
    def flat(self) -> torch.Tensor | None:
        """`stored`, for a block in one piece."""
        assert not isinstance(self.stored, ScatteredBlock), f"{self.key} is copied from its tensors"
        return self.stored


@dataclass(frozen=True, kw_only=True)
class PendingBlock:
    """Issued block, and the work that the compute thread does before its first use: `wait`, then `decode`."""

    wait: Callable[[], object] = no_op
    """Order the compute stream behind the copy. Never blocks the host."""
    decode: Callable[[], None] | None = None
    """Decode and patch on the compute thread; None if nothing has to be done or the device did it already."""
    copied: tuple[DeviceEvent, DeviceEvent] | None = None
    """Start and end of the copy out of RAM; None without such a copy."""
    decoded: tuple[DeviceEvent, DeviceEvent] | None = None
    """Start and end of decoding and patching on the device; None if there was none, or `decode` does it."""


class TransferBackend:
    """Moves the blocks of one source to one device."""

    def __init__(self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], patches: StagedPatches) -> None:
        self._source = source
        self._formats = formats
        self._patches = patches

    def begin_run(self) -> None:
        """Prepare for a run (compute thread)."""

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        """Issue the copy of a block into its buffer (fetch thread). Returns before the copy has finished."""
        raise NotImplementedError

    def end_run(self) -> None:
        """Finish a run: the fetch thread has ended and every visit was issued to the device (compute thread)."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in addition to the buffers."""
        return 0

    def settle(self) -> None:
        """Block until the device has finished all work that uses a buffer or a RAM slot. Only between runs."""

    def release_memory(self) -> int:
        """Release all device memory and return its bytes; call `settle` before. The next run allocates it again."""
        return 0

    def close(self) -> None:
        """Wait for pending copies, then release all memory, also if the device has failed.

        Raises:
            RuntimeError: the device has failed.
        """
        try:
            self.settle()
        except RuntimeError:
            self.release_memory()
            raise
        self.release_memory()
