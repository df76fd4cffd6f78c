"""Block source that reads only the shards of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...plan import BlockKey
from ..formats.layout import BlockFormat
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
        self._inner = inner
        self._rank, self._size = gather.rank, gather.size

    def keys(self) -> Iterable[BlockKey]:
        return self._inner.keys()

    def block_format(self, key: BlockKey) -> BlockFormat:
        return self._inner.block_format(key)

    def shard_bytes(self, key: BlockKey) -> int:
        """Bytes of one shard, equal on all ranks."""
        return shard_bytes(self._stored_bytes(key), self._size)

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return the scales in the file; empty if scales are computed while reading (see `GatheredScales`)."""
        return {} if self.has_row_scales else self._inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.range_file_bytes(key, self._own(key))

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory of `shard_bytes`, with the shard; padding is not written."""
        self._inner.read_range(key, self._own(key), into)

    @property
    def has_row_scales(self) -> bool:
        """True if blocks are quantised while they are read, so that ranks must exchange the scales."""
        return isinstance(self._inner, QuantisedSource)

    def local_scales(self, key: BlockKey) -> torch.Tensor:
        """Return the scales of this rank's rows, 1-D fp32 over all rows of the block; 0 for the other rows."""
        assert isinstance(self._inner, QuantisedSource), "only quantised blocks have scales of ranks"
        scales = self._inner.local_scales(key)
        return torch.cat([torch.zeros(0), *(scales[name].flatten() for name in sorted(scales))])

    def set_scales(self, key: BlockKey, every: torch.Tensor) -> None:
        """Set the scales of all rows of a block, in the order of `local_scales`."""
        assert isinstance(self._inner, QuantisedSource), "only quantised blocks have scales of ranks"
        own = self._inner.local_scales(key)
        parts = every.split([own[name].numel() for name in sorted(own)])
        self._inner.set_scales(key, {name: part.view(-1, 1) for name, part in zip(sorted(own), parts, strict=True)})

    def close(self) -> None:
        """Do nothing: the caller closes `inner`."""

    def _own(self, key: BlockKey) -> range:
        return shard_range(self._stored_bytes(key), self._rank, self._size)

    def _stored_bytes(self, key: BlockKey) -> int:
        return self._inner.block_format(key).stored.nbytes


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
        own = self._shards.local_scales(key)
        size = self._gathering.sharded.gather.size
        if own.numel():
            local = own.to(self._device)
            every = torch.empty(size, own.numel(), dtype=torch.float32, device=self._device)
            self._gathering.all_gather(every.view(-1).view(torch.uint8), local.view(torch.uint8))
            # Rows of other ranks are 0 and all scales are positive. Ranks that both read a row computed the same scale.
            own = every.amax(0).cpu()
        self._shards.set_scales(key, own)
        self._completed.add(key)
