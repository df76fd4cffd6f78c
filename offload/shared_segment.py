"""Named memory that the ranks of one machine map together, so that a block in RAM is there once and not once a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..plan import BlockKey


class SharedSegment:
    """Not there yet: blocks are not shared."""

    filled_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return False

    def fill(self, key: BlockKey, read: Callable[[torch.Tensor], None]) -> torch.Tensor:
        raise KeyError(key)
