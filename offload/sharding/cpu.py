"""Gathering on a CPU: the fetch thread brings the shards of a block together, where `CpuStreams` copies it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...devices import DeviceEvent
from ...plan import BlockKey
from ..formats.layout import BlockFormat, allocate_flat
from ..transfers.base import PendingBlock, ReleaseSource
from ..transfers.cpu import CpuStreams
from .group import GATHERS_AHEAD, Gathering
from .scales import GatheredScales
from .shards import ShardSource


class GatheredCpuStreams:
    """Blocks that are computed as they are stored are gathered straight into their buffer.

    Others are gathered into one of a few raw slots, as many as there may be gathers that nobody has decoded yet.

    Args:
        inner: decodes and patches what was gathered.
    """

    def __init__(
        self, inner: CpuStreams, shards: ShardSource, formats: Mapping[BlockKey, BlockFormat], gathering: Gathering
    ) -> None:
        self._inner = inner
        self._shards = shards
        self._formats = formats
        self._gathering = gathering
        self._scales = GatheredScales(gathering, shards, torch.device("cpu"))
        self._size = gathering.sharded.gather.size
        self._raw_slots: list[torch.Tensor] = []
        self._turn = 0

    def begin_run(self) -> None:
        largest = [self._size * self._shards.shard_bytes(key) for key, fmt in self._formats.items() if not fmt.is_raw]
        if largest and not self._raw_slots:
            self._raw_slots = [allocate_flat(max(largest), "cpu") for _ in range(GATHERS_AHEAD)]

    def land(
        self,
        key: BlockKey,
        stored: torch.Tensor | None,
        into: torch.Tensor,
        after: DeviceEvent,
        leave: ReleaseSource,
    ) -> PendingBlock:
        assert stored is not None, f"the shard of {key} lies in no slot"
        raw = self._formats[key].is_raw
        target = into if raw else self._next_raw_slot()
        self._scales.complete(key)
        began = time.perf_counter()
        self._gathering.all_gather(target[: self._size * stored.numel()], stored)
        copied = (began, time.perf_counter())
        leave()
        arrival = self._inner.land(key, None if raw else target, into, after, _stays)
        return replace(arrival, copied=copied)

    @property
    def device_bytes(self) -> int:
        return sum(slot.numel() for slot in self._raw_slots)

    def _next_raw_slot(self) -> torch.Tensor:
        self._turn += 1
        return self._raw_slots[self._turn % GATHERS_AHEAD]

    def end_run(self) -> None:
        return

    def settle(self) -> None:
        return

    def give_back(self) -> int:
        nbytes = self.device_bytes
        self._raw_slots.clear()
        return nbytes

    def close(self) -> None:
        self.give_back()


def _stays(drained: Callable[[], object] | None = None) -> None:
    """A raw slot is nobody else's until it is its turn again."""
