"""Votes: one question, asked by all workers of a cell at the same point, with the same answer for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .groups import Groups


def vote(groups: Groups, wish: bool) -> bool:
    """Whether any worker of the cell wishes it. Blocks until all have been asked.

    Raises:
        HungError: not all came within the meeting's timeout.
        PeerLostError: one of them is gone.
    """
    wished = torch.tensor([int(wish)], dtype=torch.int32)
    with groups.watched("waited for a vote"):
        dist.all_reduce(wished, op=dist.ReduceOp.MAX, group=groups.control)
    return bool(wished.item())
