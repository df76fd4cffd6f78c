"""Block source that reads only the shards of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...plan import BlockKey
from ..sources.base import RangeSource
from ..sources.quantised import QuantisedSource
from .group import Gather, Gathering, shard_bytes, shard_range


class ShardSource:
    """Returns one rank's shard of every block in place of the block, in the stored format.

    Args:
        inner: source of whole blocks; the caller closes it.
        gather: the ranks.
    """

    def __init__(self, inner: RangeSource, gather: Gather) -> None:
        self.inner = inner
        self.formats = inner.formats
        self._rank, self._size = gather.rank, gather.size

    def shard_bytes(self, key: BlockKey) -> int:
        """Bytes of one shard, equal on all ranks."""
        return shard_bytes(self._stored_bytes(key), self._size)

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return the scales in the file; empty if scales are computed while reading (see `GatheredScales`)."""
        return {} if isinstance(self.inner, QuantisedSource) else self.inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self.inner.range_file_bytes(key, self._own(key))

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory of `shard_bytes`, with the shard; padding is not written."""
        self.inner.read_range(key, self._own(key), into)

    def close(self) -> None:
        """Do nothing: the caller closes `inner`."""

    def _own(self, key: BlockKey) -> range:
        return shard_range(self._stored_bytes(key), self._rank, self._size)

    def _stored_bytes(self, key: BlockKey) -> int:
        return self.formats[key].stored.nbytes


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
        source = self._shards.inner
        if key in self._completed or not isinstance(source, QuantisedSource):
            return
        own = source.local_scales(key)  # [rows, 1] by name; 0 for rows of other ranks
        every = torch.cat([torch.zeros(0), *(scales.flatten() for scales in own.values())])
        if every.numel():
            local = every.to(self._device)
            gathered = torch.empty(
                self._gathering.sharded.gather.size, local.numel(), dtype=torch.float32, device=self._device
            )
            self._gathering.all_gather(gathered.view(-1).view(torch.uint8), local.view(torch.uint8))
            # All scales are positive. Ranks that both read a row computed the same scale.
            every = gathered.amax(0).cpu()
        parts = every.split([scales.numel() for scales in own.values()])
        source.set_scales(key, {name: part.view(-1, 1) for name, part in zip(own, parts, strict=True)})
        self._completed.add(key)
