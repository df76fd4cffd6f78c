"""Which buffers go first when device memory is asked back between runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .residency import Residency
from .visits import BlockKey


def eviction_order(buffers: Iterable[int], contents: Mapping[int, BlockKey], residency: Residency) -> tuple[int, ...]:
    """Return `buffers`, the least useful first.

    Buffers that hold nothing go before those with streamed blocks, and these before those with residents. Of each kind
    the block goes first that the next run reaches last, because its fetch has most time to bring it back.
    """
    experts = {expert: number for number, expert in enumerate(residency.residents)}

    def usefulness(buffer: int) -> tuple[int, int, int]:
        block = contents.get(buffer)
        if block is None:
            return (0, 0, -buffer)
        resident = residency.keeps(block.expert, block.block)
        return (2 if resident else 1, -experts.get(block.expert, len(experts)), -block.block)

    return tuple(sorted(buffers, key=usefulness))
