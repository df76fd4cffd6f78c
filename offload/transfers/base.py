"""Transfer backend interface: asynchronous block copies into buffers (`cpu.py`, `cuda.py`).

The fetch thread calls `copy_in` for one fetch after the other. Each call issues a block's copy from
RAM slot to buffer and returns a `PendingBlock`. The compute thread finishes it before it uses the
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...devices import DeviceEvent
from ...plan.programs import BlockKey
from ..core.pages import HostBlock, ScatteredBlock
from ..sources.base import BlockSource
from .patches import SlotPatch, StagedPatch, StagedPatches


def no_op(drained: object = None) -> None:
    """Do nothing."""


class ReleaseSource(Protocol):
    """Callback that releases a fetch's RAM slot.

    A backend calls it once per fetch with a slot.
    """

    def __call__(self, drained: Callable[[], object] | None = None) -> None:
        """Release the slot.

        Args:
            drained: blocks the host until the copy out of the slot has finished. None: it has
                finished.
        """


class BlockCopy(NamedTuple):
    """Copy of one block from RAM slot to buffer."""

    key: BlockKey
    stored: HostBlock | None
    """Block bytes in RAM. None if read directly into the buffer. Scattered only for
    `CudaBackend`."""
    into: torch.Tensor
    """The buffer, 1-D uint8. It is free once the device has passed `after`."""
    after: DeviceEvent
    """End of the last visit that read the buffer."""
    release_source: ReleaseSource
    """Called once `stored` is no longer needed."""
    patch: StagedPatch | None = None
    """Patch missing in `stored`."""
    slot_patch: SlotPatch | None = None
    """Patch in the bytes of `stored`. None if they do not change."""

    @property
    def flat(self) -> torch.Tensor | None:
        """`stored`, for a block in one piece."""
        assert not isinstance(self.stored, ScatteredBlock), f"{self.key} is copied from its tensors"
        return self.stored


@dataclass(frozen=True, kw_only=True)
class PendingBlock:
    """Issued block, with the compute thread's work before first use: `wait`, then `decode`."""

    wait: Callable[[], object] = no_op
    """Order the compute stream behind the copy. Never blocks the host."""
    decode: Callable[[], None] | None = None
    """Decode and patch on the compute thread. None if there is nothing to do or the device did it
    already."""
    copied: tuple[DeviceEvent, DeviceEvent] | None = None
    """Start and end of the copy out of RAM. None without such a copy."""
    decoded: tuple[DeviceEvent, DeviceEvent] | None = None
    """Start and end of decoding and patching on the device. None without it, or if `decode` does
    it."""


class TransferBackend:
    """Moves blocks from one source to one device."""

    def __init__(self, source: BlockSource, patches: StagedPatches) -> None:
        self._source = source
        self._formats = source.formats
        self._patches = patches

    def begin_run(self) -> None:
        """Prepare for a run (compute thread)."""

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        """Issue a block's copy into its buffer (fetch thread).

        Returns before the copy has finished.
        """
        raise NotImplementedError

    def end_run(self) -> None:
        """Finish a run after the fetch thread has ended (compute thread).

        Every visit has been issued to the device.
        """

    @property
    def device_bytes(self) -> int:
        """Device memory in addition to the buffers, in bytes."""
        return 0

    def settle(self) -> None:
        """Block until the device has finished all work that uses a buffer or a RAM slot.

        Only between runs.
        """

    def release_memory(self) -> int:
        """Release all device memory and return the freed bytes. Call `settle` before.

        The next run allocates it again.
        """
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
