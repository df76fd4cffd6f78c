"""CPU transfer backend for sharded blocks: the fetch thread gathers each block, `CpuBackend` does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...plan import BlockKey
from ..formats.layout import BlockFormat, allocate_flat
from ..patches import StagedPatches
from ..sources.base import BlockSource
from ..transfers.base import BlockCopy, PendingBlock
from ..transfers.cpu import CpuBackend
from .group import GATHERS_AHEAD, Gathering
from .shards import ShardSource


class GatherCpuBackend(CpuBackend):
    """Gathers raw blocks directly into their buffer, and blocks that need decoding into a raw slot."""

    def __init__(
        self,
        source: BlockSource,
        shards: ShardSource,
        formats: Mapping[BlockKey, BlockFormat],
        patches: StagedPatches,
        gathering: Gathering,
    ) -> None:
        super().__init__(source, formats, patches)
        self._shards = shards
        self._gathering = gathering
        self._size = gathering.sharded.gather.size
        self._raw_slots: list[torch.Tensor] = []
        self._turn = 0

    def begin_run(self) -> None:
        largest = [self._size * self._shards.shard_bytes(key) for key, fmt in self._formats.items() if not fmt.is_raw]
        if largest and not self._raw_slots:
            # `EngineRun` issues at most GATHERS_AHEAD gathers before the compute thread has decoded the first one.
            self._raw_slots = [allocate_flat(max(largest), "cpu") for _ in range(GATHERS_AHEAD)]

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key = copy.key
        stored = copy.flat
        assert stored is not None, f"the shard of {key} has no slot"
        raw = self._formats[key.stored].is_raw
        target = copy.into if raw else self._next_raw_slot()
        start = time.perf_counter()
        self._gathering.all_gather(target[: self._size * stored.numel()], stored)
        copied = (start, time.perf_counter())
        copy.release_source()
        pending = super().copy_in(copy._replace(stored=None if raw else target, release_source=_keep_slot))
        return replace(pending, copied=copied)

    @property
    def device_bytes(self) -> int:
        return sum(slot.numel() for slot in self._raw_slots)

    def _next_raw_slot(self) -> torch.Tensor:
        self._turn += 1
        return self._raw_slots[self._turn % GATHERS_AHEAD]

    def release_memory(self) -> int:
        nbytes = self.device_bytes
        self._raw_slots.clear()
        return nbytes


def _keep_slot(drained: Callable[[], object] | None = None) -> None:
    """Do nothing: raw slots are reused in turn and are not released."""
