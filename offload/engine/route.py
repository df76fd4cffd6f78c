"""Route of one engine's blocks from their source to the buffers: RAM slots and transfer backend.

Whole blocks are read into RAM slots and copied, or copied from the tensors of their source. If blocks are sharded, the
slots, in RAM or on the device, hold this rank's shards, and the ranks gather the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...devices import runtime_for
from ...plan import STAGING_SLOTS, BlockKey
from ..formats.layout import BlockFormat
from ..host_memory.in_place import InPlaceBlocks
from ..host_memory.pages import PageLock
from ..host_memory.ram_slots import RamSlots
from ..host_memory.shared_segment import SharedSegment
from ..patches import StagedPatches
from ..sharding.cpu import GatherCpuBackend
from ..sharding.cuda import GatherCudaBackend
from ..sharding.device_slots import DeviceSlots
from ..sharding.group import Gathering, Sharded
from ..sharding.shards import ShardSource
from ..sources.base import BlockSource, RangeSource
from ..sources.module import TensorSource
from ..transfers.base import TransferBackend
from ..transfers.cpu import CpuBackend, SynchronousBackend
from ..transfers.cuda import CudaBackend


class Route:
    """Creates the slots and the transfer backend for the blocks of one source.

    Attributes:
        gathering: the group of ranks; None if blocks are not sharded.
        sizes: bytes that this rank stores of every block.
        buffer_bytes: bytes of a buffer: the largest block as it is computed with, or as gathered shards with padding.
    """

    def __init__(
        self,
        source: BlockSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        *,
        device: torch.device,
        sharded: Sharded | None,
    ) -> None:
        self._source = source
        self._formats = formats
        self._patches = patches
        self._device = device
        self.gathering: Gathering | None = None
        self.sizes = {key: fmt.stored.nbytes for key, fmt in formats.items()}
        self.buffer_bytes = max(fmt.computed.nbytes for fmt in formats.values())
        if sharded is not None:
            self.meet(sharded)
            size = sharded.gather.size
            self.sizes = {key: self._shards.shard_bytes(key) for key in formats}
            padded = [size * self.sizes[key] for key, fmt in formats.items() if fmt.is_raw]
            self.buffer_bytes = max([self.buffer_bytes, *padded])

    @property
    def staging(self) -> int:
        """Number of staging slots in RAM; 0 if blocks can be read directly into a buffer."""
        direct = self._device.type == "cpu" and all(fmt.is_raw for fmt in self._formats.values())
        return 0 if direct and self.gathering is None else STAGING_SLOTS

    @property
    def block_source(self) -> BlockSource:
        """Source of the bytes that this rank stores: whole blocks, or its shards of them."""
        return self._source if self.gathering is None else self._shards

    def meet(self, sharded: Sharded) -> None:
        """Gather with the ranks of `sharded` from now on; rank and size must not change."""
        self._shards = ShardSource(cast(RangeSource, self._source), sharded.gather)
        stored = {key: fmt.stored.nbytes for key, fmt in self._formats.items()}
        self.gathering = Gathering(sharded, stored)

    def ram_slots(self, lock: PageLock | None, shared: SharedSegment | None) -> RamSlots:
        """Create the slots for the bytes that this rank stores."""
        if self.gathering is None:
            runtime = runtime_for(self._device)
            in_place = None
            if runtime is not None and shared is None and isinstance(self._source, TensorSource):
                in_place = InPlaceBlocks(self._source, runtime)
            return RamSlots(self.sizes, lock=lock, shared=shared, in_place=in_place)
        assert shared is None, "ranks with different shards cannot share RAM"
        device_slots = DeviceSlots(self._device, lock=lock) if self.gathering.sharded.on_device else None
        return RamSlots(self.sizes, lock=lock, on_device=device_slots)

    def transfer_backend(self) -> TransferBackend:
        """Create the transfer backend for this device and group."""
        source, formats, patches = self._source, self._formats, self._patches
        runtime = runtime_for(self._device)
        if self.gathering is None:
            if runtime is not None:
                return CudaBackend(source, formats, patches, runtime=runtime)
            return (CpuBackend if self._device.type == "cpu" else SynchronousBackend)(source, formats, patches)
        if runtime is not None:
            return GatherCudaBackend(source, self._shards, formats, patches, self.gathering, runtime=runtime)
        return GatherCpuBackend(source, self._shards, formats, patches, self.gathering)
