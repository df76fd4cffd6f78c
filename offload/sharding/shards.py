"""Block source that reads only the shards of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...plan import BlockKey
from ..sources.base import RangeSource
from .group import Gather, shard_bytes, shard_range


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
        return self.inner.scales(key)

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
