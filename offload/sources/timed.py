"""Block source that measures the reads of another source."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch

from ...plan import BlockKey
from ...telemetry import Ranges, ReadSpan, ranged
from ..formats.layout import BlockFormat
from .base import BlockSource


class TimedSource:
    """Decorator of a block source: measures every `read_block` and names it for a profiler.

    Args:
        inner: source to read from; the caller closes it.
        ranges: profiler ranges; None for none.
    """

    def __init__(self, inner: BlockSource, ranges: Ranges | None = None) -> None:
        self._inner = inner
        self._ranges = ranges
        # By key, because two threads may read at once: they never read the same block.
        self._reads: dict[BlockKey, tuple[float, float, int]] = {}

    def keys(self) -> Iterable[BlockKey]:
        return self._inner.keys()

    def block_format(self, key: BlockKey) -> BlockFormat:
        return self._inner.block_format(key)

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self._inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        nbytes = self._inner.file_bytes(key)
        start = time.perf_counter()
        with ranged(self._ranges, f"read {key.expert} {key.block}"):
            self._inner.read_block(key, into)
        self._reads[key] = (start, time.perf_counter(), nbytes)

    def take_span(self, key: BlockKey, *, straight: bool = False) -> ReadSpan | None:
        """Return and forget the last read of a block; None if it was not read since the last call.

        Args:
            straight: the block was read into a buffer, not into RAM.
        """
        read = self._reads.pop(key, None)
        return None if read is None else ReadSpan(*read, straight)

    def close(self) -> None:
        """Do nothing: the inner source belongs to the caller."""
