"""One block source made from several, for stacks that share a buffer pool."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...plan.programs import BlockKey
from .base import BlockSource
from .module import TensorSource


class JoinedSource(BlockSource):
    """Source of all blocks in other sources.

    Args:
        sources: one source per stack, by the name for the stack. They are closed with this one.
    """

    def __init__(self, sources: Mapping[str, BlockSource]) -> None:
        self._sources = sources
        self._keys = {
            key._replace(expert=stack): key
            for stack, source in sources.items()
            for key in source.formats
        }
        self.formats = {
            joined: sources[joined.expert].formats[key] for joined, key in self._keys.items()
        }

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self._sources[key.expert].scales(self._keys[key])

    def file_bytes(self, key: BlockKey) -> int:
        return self._sources[key.expert].file_bytes(self._keys[key])

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self._sources[key.expert].read_block(self._keys[key], into)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


def joined_source(sources: Mapping[str, BlockSource]) -> BlockSource:
    """Return a `JoinedSource`, or a `TensorSource` if all sources are, to lock pages in place."""
    in_memory = {
        key._replace(expert=stack): source.weights(key)
        for stack, source in sources.items()
        if isinstance(source, TensorSource)
        for key in source.formats
    }
    if all(isinstance(source, TensorSource) for source in sources.values()):
        return TensorSource(in_memory)
    return JoinedSource(sources)
