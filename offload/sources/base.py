"""Interface of block sources, and measured reads from them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from ...plan import BlockKey
from ...telemetry import Ranges, ReadSpan, ranged
from ..formats.layout import BlockFormat


class SourceError(OSError):
    """A block could not be read. The message names the file or block, and the remedy."""


class InsufficientRamError(SourceError):
    """There is not enough RAM for blocks. The message has both figures."""


class BlockSource(Protocol):
    """Source of blocks as flat bytes in their stored dtype: a checkpoint, or the weights of modules.

    Methods may be called from any thread; at most two threads read blocks at once. After an error the source remains
    usable, and the next call tries again.
    """

    def keys(self) -> Iterable[BlockKey]:
        """Return every block that can be read, in the order of the model."""
        ...

    def block_format(self, key: BlockKey) -> BlockFormat:
        """Return the stored and the computed layout of a block, without reading the block."""
        ...

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return the fp32 CPU scales by parameter name, each 0-d or [rows, 1]; empty if there are none.

        The first call reads them; later calls return the same tensors.
        """
        ...

    def file_bytes(self, key: BlockKey) -> int:
        """Return the bytes that one `read_block` reads from files."""
        ...

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Read a block into `into`, 1-D uint8 CPU memory of `stored.nbytes` bytes.

        Raises:
            SourceError: the bytes could not be read; the contents of `into` are then undefined.
        """
        ...

    def close(self) -> None:
        """Release files, threads and memory. Closing twice is allowed."""
        ...


class RangeSource(BlockSource, Protocol):
    """Source that can read a part of a block."""

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self.read_range(key, range(self.block_format(key).stored.nbytes), into)

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        """Return the approximate bytes that `read_range` reads from files."""
        ...

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """Read the bytes `wanted` of the stored block into `into`, 1-D uint8 CPU memory of at least that size.

        Raises:
            SourceError: the bytes could not be read; the contents of `into` are then undefined.
        """
        ...


def timed_read(
    source: BlockSource, key: BlockKey, into: torch.Tensor, ranges: Ranges | None, *, straight: bool = False
) -> ReadSpan:
    """Read a block as `BlockSource.read_block` does, and return the measured read.

    Args:
        source: source to read from.
        key: the block.
        into: memory of the block.
        ranges: profiler ranges, one of which gets the name of the block; None for none.
        straight: the block is read into a buffer, not into RAM.
    """
    start = time.perf_counter()
    with ranged(ranges, f"read {key.expert} {key.block}"):
        source.read_block(key, into)
    return ReadSpan(start, time.perf_counter(), source.file_bytes(key), straight)
