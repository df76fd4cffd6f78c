"""Collectives on the CPU by which all workers of a group come to the same decision.

All workers of a group must call them at the same points of a run. One call of `any_rank_wants` took 0.20 ms between 2
processes and 0.66 ms between 4 (median of three medians of 1,000 calls, over loopback, on 2 CPU cores that were in use
by other processes too). A block of an A14B expert computes for much longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .groups import ProcessGroups


def any_rank_wants(groups: ProcessGroups, wants: bool) -> bool:
    """Return True on all workers of the group if `wants` is True on any of them. Blocks until all have called.

    Raises:
        WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
        PeerLostError: a worker is gone.
    """
    flag = torch.tensor([int(wants)], dtype=torch.int32)
    with groups.translate_errors("waited for a decision of its group"):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=groups.control)
    return bool(flag.item())


def all_gather_cpu(groups: ProcessGroups, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the `values` of every worker of the group, by group rank; all must be on the CPU and of one shape.

    Blocks and raises as `any_rank_wants`. Results computed from the list in one order are bit-equal on all workers.
    """
    gathered = [torch.empty_like(values) for _ in range(groups.size)]
    with groups.translate_errors("waited for the values of its group"):
        dist.all_gather(gathered, values.contiguous(), group=groups.control)
    return gathered
