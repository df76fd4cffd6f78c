"""The scales of blocks that are quantised while they are read: each rank has made those of its own rows only."""

from __future__ import annotations

import torch

from ...plan import BlockKey
from .group import Gathering
from .shards import ShardSource


class GatheredScales:
    """Brings the scales of every block together, once in a rendezvous, before its first shard is gathered.

    Args:
        gathering: the ranks.
        shards: has read the own rows, and is told all scales.
        device: where the ranks gather.
    """

    def __init__(self, gathering: Gathering, shards: ShardSource, device: torch.device) -> None:
        self._gathering = gathering
        self._shards = shards
        self._device = device
        self._known: set[BlockKey] = set()

    def complete(self, key: BlockKey) -> None:
        """Know all scales of a block whose own shard was read (fetch thread, on the stream that gathers).

        On a GPU the host waits for it, so for each block once.
        """
        if key in self._known or not self._shards.has_row_scales:
            return
        own = self._shards.own_scales(key)
        size = self._gathering.sharded.gather.size
        if own.numel():
            mine = own.to(self._device)
            every = torch.empty(size, own.numel(), dtype=torch.float32, device=self._device)
            self._gathering.all_gather(every.view(-1).view(torch.uint8), mine.view(torch.uint8))
            # Scales are above 0, and two ranks that have both read a row have made the same one of it.
            own = every.amax(0).cpu()
        self._shards.put_scales(key, own)
        self._known.add(key)
