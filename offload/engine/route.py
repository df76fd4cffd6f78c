"""The way of one engine's blocks: which of their bytes come into RAM, and what brings them into buffers.

Whole blocks lie in slots of RAM and are copied. Of sharded ones the own shard lies there, or on the device, and the
ranks gather them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from ...plan import STAGING_SLOTS, BlockKey
from ..formats.layout import BlockFormat
from ..host_memory.page_lock import PageLock
from ..host_memory.ram_slots import RamSlots
from ..host_memory.shared_segment import SharedSegment
from ..patches import StagedPatches
from ..sharding.cpu import GatheredCpuStreams
from ..sharding.cuda import GatheredCudaStreams
from ..sharding.device_slots import DeviceSlots
from ..sharding.group import Gathering, Sharded
from ..sharding.shards import ShardSource
from ..sources.base import BlockSource, RangeSource
from ..transfers.base import Streams
from ..transfers.cpu import CpuStreams
from ..transfers.cuda import CudaStreams


class Route:
    """Makes slots and streams for the blocks of one source.

    `sizes` are the bytes of every block that this rank keeps, `buffer_bytes` those of a buffer, which holds the largest
    block in its computed form, and for sharded blocks the padding behind them.
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
        """Slots of RAM beside those of homes; none where bytes can be read straight into a buffer."""
        straight = self._device.type == "cpu" and all(fmt.is_raw for fmt in self._formats.values())
        return 0 if straight and self.gathering is None else STAGING_SLOTS

    @property
    def block_source(self) -> BlockSource:
        """Source of the bytes that this rank stores: whole blocks, or its shards of them."""
        return self._source if self.gathering is None else self._shards

    def meet(self, sharded: Sharded) -> None:
        """Gather with these ranks from now on; their number and the own place are as before."""
        self._shards = ShardSource(cast(RangeSource, self._source), sharded.gather)
        stored = {key: fmt.stored.nbytes for key, fmt in self._formats.items()}
        self.gathering = Gathering(sharded, stored)

    def ram_slots(self, lock: PageLock | None, shared: SharedSegment | None) -> RamSlots:
        """Slots for what this rank keeps."""
        if self.gathering is None:
            return RamSlots(self.sizes, lock=lock, shared=shared)
        assert shared is None, "ranks that keep a shard each share nothing"
        there = DeviceSlots(self._device, lock=lock) if self.gathering.sharded.on_device else None
        return RamSlots(self.sizes, lock=lock, on_device=there)

    def streams(self) -> Streams:
        """What brings blocks into buffers."""
        source, formats, patches = self._source, self._formats, self._patches
        on_gpu = self._device.type == "cuda"
        if self.gathering is None:
            if on_gpu:
                return CudaStreams(source, formats, patches, device=self._device)
            return CpuStreams(source, formats, patches)
        if on_gpu:
            return GatheredCudaStreams(source, self._shards, formats, patches, self.gathering, device=self._device)
        return GatheredCpuStreams(CpuStreams(source, formats, patches), self._shards, formats, self.gathering)
