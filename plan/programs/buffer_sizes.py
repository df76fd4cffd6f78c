"""Buffer sizes, and the blocks allowed in each buffer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ...schema import OffloadPolicy, Residency, plan_residency
from .visits import BlockKey

JOINED = 0.97
"""Blocks with at least this share of a size get buffers of that size, so few sizes exist."""


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Buffer capacities, and the bytes needed by blocks.

    A resident uses only buffers with exactly its size, so no other resident can take the last one
    large enough. A streamed block uses every buffer that is large enough, until a resident needs
    it.
    """

    capacities: tuple[int, ...]
    """Bytes per buffer."""
    blocks: Mapping[BlockKey, int]
    """Bytes per block. For a resident: the capacity of the buffers it may use."""

    @property
    def nbytes(self) -> int:
        """Total bytes in all buffers."""
        return sum(self.capacities)


def plan_buffers(
    policy: OffloadPolicy, block_bytes: Mapping[str, Sequence[int]]
) -> tuple[Residency, BufferSizes]:
    """Return the residents for stacks with these block sizes, and the buffer sizes.

    Each resident has a buffer in its own size, and streamed blocks have buffers for the largest
    among them. Experts take turns and share buffers, so the n-th largest buffer is as large as the
    n-th largest in the more demanding expert.

    Raises ValueError if policy and blocks do not match.
    """
    counts = {expert: len(blocks) for expert, blocks in block_bytes.items()}
    residency, most = plan_residency(policy, counts, block_bytes)
    sizes = joined_sizes(nbytes for blocks in block_bytes.values() for nbytes in blocks)
    needed = {
        BlockKey(expert, block): sizes[nbytes]
        for expert, blocks in block_bytes.items()
        for block, nbytes in enumerate(blocks)
    }
    # Permanent residents of all experts exist at the same time. Otherwise the experts take turns.
    at_once = [list(block_bytes)] if residency.permanent else [[expert] for expert in block_bytes]
    wanted = [
        _wanted(
            residency,
            {key: nbytes for key, nbytes in needed.items() if key.expert in experts},
            streaming=policy.prefetch_blocks + 1,
            most=most,
        )
        for experts in at_once
    ]
    capacities: list[int] = []
    for largest in zip_longest(*wanted, fillvalue=(0, None)):
        capacities.append(max(nbytes for nbytes, _ in largest))
        needed |= {key: capacities[-1] for _, key in largest if key is not None}
    return residency, BufferSizes(capacities=tuple(capacities), blocks=needed)


def _wanted(
    residency: Residency, needed: Mapping[BlockKey, int], *, streaming: int, most: int
) -> list[tuple[int, BlockKey | None]]:
    """Return the buffers for blocks, largest first: bytes, and the resident or None."""
    residents = [(nbytes, key) for key, nbytes in needed.items() if residency.keeps(*key)]
    streamed = [nbytes for key, nbytes in needed.items() if not residency.keeps(*key)]
    buffers: list[tuple[int, BlockKey | None]] = [*residents]
    if streamed:
        # Any of these may hold any streamed block, so each is as large as the largest.
        buffers += [(max(streamed), None)] * min(streaming, most - len(residents))
    # The key is the size alone, because a BlockKey and None cannot be compared.
    return sorted(buffers, key=lambda buffer: -buffer[0])


def joined_sizes(sizes: Iterable[int]) -> dict[int, int]:
    """Return buffer bytes for each block size: the size itself, or one slightly larger."""
    joined: dict[int, int] = {}
    capacity = 0
    for size in sorted(set(sizes), reverse=True):
        if size < JOINED * capacity or not capacity:
            capacity = size
        joined[size] = capacity
    return joined


class BufferPool:
    """Buffers shared by a program's lifetimes, in capacity levels from the smallest up.

    Args:
        numbers: buffer numbers.
        sizes: buffer sizes. None: each block fits into each buffer.
    """

    def __init__(self, numbers: range, sizes: BufferSizes | None) -> None:
        self.numbers = numbers
        self._needed = None if sizes is None else sizes.blocks
        capacities = {each: 0 if sizes is None else sizes.capacities[each] for each in numbers}
        self._capacities = sorted(set(capacities.values()))
        self.level_of = {
            each: self._capacities.index(capacity) for each, capacity in capacities.items()
        }

    @property
    def size(self) -> int:
        """Buffer count. Below 0 if there are too few to set those for residents apart."""
        # `len` would return 0 for a negative range.
        return self.numbers.stop - self.numbers.start

    @property
    def counts(self) -> list[int]:
        """Buffer count per level."""
        counts = [0] * len(self._capacities)
        for level in self.level_of.values():
            counts[level] += 1
        return counts

    def levels_for(self, block: BlockKey, *, resident: bool) -> range:
        """Return the levels a block may use. Empty if no buffer suits it."""
        needed = 0 if self._needed is None else self._needed[block.stored]
        low = bisect_left(self._capacities, needed)
        if not resident:
            return range(low, len(self._capacities))
        # The level counts for a resident only if it equals the size exactly, see `BufferSizes`.
        return range(low, low + (self._capacities[low : low + 1] == [needed]))
