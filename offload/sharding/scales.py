"""Exchange of fp8 scales between ranks: each rank has computed those of its own rows only."""

from __future__ import annotations

import torch

from ...plan import BlockKey
from .group import Gathering
from .shards import ShardSource


class GatheredScales:
    """Gathers the scales of each block once per rendezvous, before the first gather of its shards.

    Args:
        gathering: the group of ranks.
        shards: provides the scales of the rows that this rank has read, and receives all scales.
        device: device of the gather.
    """

    def __init__(self, gathering: Gathering, shards: ShardSource, device: torch.device) -> None:
        self._gathering = gathering
        self._shards = shards
        self._device = device
        self._completed: set[BlockKey] = set()

    def complete(self, key: BlockKey) -> None:
        """Gather all scales of a block whose shard this rank has read (fetch thread, on the gather stream).

        On a GPU the host waits for this gather, once per block.
        """
        if key in self._completed or not self._shards.has_row_scales:
            return
        own = self._shards.own_scales(key)
        size = self._gathering.sharded.gather.size
        if own.numel():
            local = own.to(self._device)
            every = torch.empty(size, own.numel(), dtype=torch.float32, device=self._device)
            self._gathering.all_gather(every.view(-1).view(torch.uint8), local.view(torch.uint8))
            # Rows of other ranks are 0 and all scales are positive. Ranks that both read a row computed the same scale.
            own = every.amax(0).cpu()
        self._shards.put_scales(key, own)
        self._completed.add(key)
