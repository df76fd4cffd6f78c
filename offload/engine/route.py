"""Route for an engine's blocks from their source to the buffers: RAM slots and transfer backend.

Whole blocks are read into RAM slots and copied, or copied from their source's tensors. If blocks
are sharded, the slots, in RAM or on the device, hold this rank's shards, and the ranks gather the
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...devices import runtime_for
from ...plan.programs import STAGING_SLOTS, BlockKey
from ..core.pages import PageLock, keep_freed_memory
from ..host_memory.device_slots import DeviceSlots
from ..host_memory.in_place import InPlaceBlocks
from ..host_memory.ram_slots import RamSlots
from ..host_memory.shared_segment import SharedSegment
from ..sharding.group import Gather, Gathering, Sharded, shard_range
from ..sources.base import BlockSource, RangeSource
from ..sources.module import TensorSource
from ..transfers.base import TransferBackend
from ..transfers.cpu import CpuBackend, GatherCpuBackend, SynchronousBackend
from ..transfers.cuda import CudaBackend, GatherCudaBackend
from ..transfers.patches import StagedPatches


class ShardSource:
    """Returns one rank's shard in place of every block, in the stored format.

    Args:
        inner: source with whole blocks. The caller closes it.
        gather: the ranks.
    """

    def __init__(self, inner: RangeSource, gather: Gather) -> None:
        self.inner = inner
        self.formats = inner.formats
        self._gather = gather

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self.inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self.inner.range_file_bytes(key, self._own(key))

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory as large as a shard, with the shard.

        Padding is not written.
        """
        self.inner.read_range(key, self._own(key), into)

    def close(self) -> None:
        """Do nothing: the caller closes `inner`."""

    def _own(self, key: BlockKey) -> range:
        nbytes = self.formats[key].stored.nbytes
        return shard_range(nbytes, self._gather.rank, self._gather.size)


class Route:
    """Creates the slots and the transfer backend for the blocks in one source.

    Attributes:
        gathering: the group of ranks. None if blocks are not sharded.
        block_source: source for this rank's bytes: whole blocks, or shards.
        sizes: bytes stored on this rank per block.
        computed_sizes: bytes per block in a buffer: in computed form, or as gathered shards with
            padding.
    """

    def __init__(
        self,
        source: BlockSource,
        patches: StagedPatches,
        *,
        device: torch.device,
        sharded: Sharded | None,
    ) -> None:
        self._source = source
        self._formats = source.formats
        self._patches = patches
        self._device = device
        self._runtime = runtime_for(device)
        self.gathering: Gathering | None = None
        self.block_source = source
        self.sizes = {key: fmt.stored.nbytes for key, fmt in source.formats.items()}
        self.computed_sizes = {key: fmt.computed.nbytes for key, fmt in source.formats.items()}
        if sharded is not None:
            gathering = self.meet(sharded)
            self.sizes = {key: gathering.shard_bytes(key) for key in self._formats}
            for key, fmt in self._formats.items():
                if fmt.is_raw:
                    # Shards are gathered straight into the buffer, with padding at the end.
                    padded = gathering.gathered_bytes(key)
                    self.computed_sizes[key] = max(self.computed_sizes[key], padded)

    @property
    def staging(self) -> int:
        """Number of staging slots in RAM. 0 if blocks can be read directly into a buffer."""
        direct = self._device.type == "cpu" and all(fmt.is_raw for fmt in self._formats.values())
        if direct and self.gathering is None:
            return 0
        return STAGING_SLOTS

    def meet(self, sharded: Sharded) -> Gathering:
        """Gather with the ranks of `sharded` from now on. Rank and size must not change."""
        self.block_source = ShardSource(cast(RangeSource, self._source), sharded.gather)
        stored = {key: fmt.stored.nbytes for key, fmt in self._formats.items()}
        self.gathering = Gathering(sharded, stored)
        return self.gathering

    def ram_slots(self, lock: PageLock | None, shared: SharedSegment | None) -> RamSlots:
        """Create the slots for the bytes stored on this rank."""
        if self.gathering is None:
            in_place = None
            if self._runtime and shared is None and isinstance(self._source, TensorSource):
                in_place = InPlaceBlocks(self._source, self._runtime)
            # A decoded block's slot is in the stored form, and a patched result is not. A shared
            # segment belongs to all ranks.
            raw = frozenset(key for key, fmt in self._formats.items() if fmt.is_raw)
            keeps = raw if shared is None else frozenset[BlockKey]()
            return RamSlots(
                self.sizes, lock=lock, shared=shared, in_place=in_place, keeps_patches=keeps
            )
        assert shared is None, "ranks with different shards cannot share RAM"
        on_device = None
        if self.gathering.sharded.on_device:
            on_device = DeviceSlots(self._device, lock=lock)
        return RamSlots(self.sizes, lock=lock, on_device=on_device)

    def transfer_backend(self) -> TransferBackend:
        """Create the transfer backend for this device and group."""
        blocks = (self._source, self._patches)
        if self._runtime is not None:
            if self.gathering is not None:
                return GatherCudaBackend(*blocks, self._runtime, self.gathering)
            return CudaBackend(*blocks, self._runtime)
        # Other devices without streams need this, too: their blocks are decoded in RAM.
        keep_freed_memory()
        if self.gathering is not None:
            return GatherCpuBackend(*blocks, self.gathering)
        if self._device.type == "cpu":
            return CpuBackend(*blocks)
        return SynchronousBackend(*blocks)
