"""What the engine asks of a place where blocks are kept: a checkpoint, RAM, or a module's own weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from ...plan import BlockKey
from ..formats.layout import BlockFormat


class SourceError(OSError):
    """A block could not be read. Says which file or block, and what to do about it."""


class NoRamError(SourceError):
    """There is too little RAM for blocks. Says how much is needed and how much there is; no file is at fault."""


class BlockSource(Protocol):
    """Gives blocks as flat bytes in their stored dtype.

    Methods may be called from any thread; blocks are read by at most two threads at once. An error leaves the source
    usable: the next call tries again.
    """

    def keys(self) -> Iterable[BlockKey]:
        """Return every block that can be read, in the order of the model."""
        ...

    def block_format(self, key: BlockKey) -> BlockFormat:
        """Return how the block is stored and how it is computed with. Reads nothing."""
        ...

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return the fp32 CPU scales by parameter name, each 0-d or [rows, 1]; empty if there are none.

        They are read on the first call and kept.
        """
        ...

    def file_bytes(self, key: BlockKey) -> int:
        """Return the bytes that one `read_block` takes from where the block is kept."""
        ...

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory of `stored.nbytes`, and return when it is filled.

        Raises:
            SourceError: the bytes could not be read; `into` then holds anything.
        """
        ...

    def close(self) -> None:
        """Release files, threads and memory. Closing twice is allowed."""
        ...


class RangeSource(BlockSource, Protocol):
    """A source that can give a part of a block."""

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        """Return the bytes that `read_range` takes from where the block is kept, about."""
        ...

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory of at least that size, with the bytes `wanted` of the stored form.

        Raises:
            SourceError: the bytes could not be read; `into` then holds anything.
        """
        ...
