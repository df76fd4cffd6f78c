"""Lanes shared by two workers: under guidance, one computes the positive lanes and the other the negative ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..sampling.split import Compute
from ..wan import Lane

if TYPE_CHECKING:
    from .groups import Groups


def own_lanes(count: int, side: int) -> slice:
    """The lanes that a side computes: the first half, or the last; one in the middle is computed by both.

    Lanes come in the order of `LaneInputs.lanes`, so that halves are the positive and the negative ones. Both sides
    have as many, which costs no time: they wait for each other anyway.
    """
    half = (count + 1) // 2
    return slice(0, half) if side == 0 else slice(count - half, count)


def forward_shared(groups: Groups, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
    """The velocity of every lane, of which this worker computes its side's; the others come from its peer.

    All workers have the same bits afterwards, whoever computed them.
    """
    group = groups.group("cfg")
    side = dist.get_rank(group)
    own = torch.stack(compute(lanes[own_lanes(len(lanes), side)]))
    sides = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(sides, own, group=group)
    groups.count_gathered(own.nbytes)
    first, last = sides
    return [*first, *last[2 * len(last) - len(lanes) :]]
