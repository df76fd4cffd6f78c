"""Shared forward passes of a group: lanes between the cfg sides, tokens inside each side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...sampling import AllReduced, Compute, Share, tokens_of
from ...wan import ExpertEngine, Lane
from .consensus import all_gather_cpu
from .context_parallel import check_tokens, shared_tokens

if TYPE_CHECKING:
    from .groups import ProcessGroups


def own_lanes(count: int, side: int) -> slice:
    """The lanes that a side computes: the first half, or the last; one in the middle is computed by both.

    Lanes come in the order of `LaneInputs.lanes`, so that halves are the positive and the negative ones. Both sides
    have as many, which costs no time: they wait for each other anyway.
    """
    half = (count + 1) // 2
    return slice(0, half) if side == 0 else slice(count - half, count)


def forward_shared(groups: ProcessGroups, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
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


class GroupForward:
    """The share of one worker of a group of two or more; see `ParallelForward`."""

    alone = False

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.share = Share(cfg=groups.mesh.cfg, ring=groups.mesh.ring, ulysses=groups.mesh.ulysses)

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """See `ParallelForward.attached`.

        Raises MeshError where the mesh does not fit the experts or this device.
        """
        mesh = self._groups.mesh
        return nullcontext() if mesh.ring * mesh.ulysses == 1 else shared_tokens(self._groups, engine)

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """See `ParallelForward.forward`.

        Raises:
            MeshError: the tokens of a lane cannot be shared out evenly.
            HungError: another worker did not come within the rendezvous's timeout.
            PeerLostError: another worker is gone.
        """
        for lane in lanes:
            check_tokens(tokens_of(lane.latents.shape), self._groups)
        with self._groups.watched("computed a step"):
            if self._groups.mesh.cfg == 1:
                return compute(lanes)
            return forward_shared(self._groups, lanes, compute)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `ParallelForward.own_tokens`: as diffusers' context parallelism cuts them in front of the first block."""
        shares = self._tokens_shared_by
        if shares == 1:
            return tokens
        return tokens.chunk(shares, dim=1)[self._groups.place % shares]

    def agreed(self, sums: torch.Tensor) -> AllReduced:
        """See `ParallelForward.agreed`.

        Raises:
            HungError: not all came within the rendezvous's timeout.
            PeerLostError: one of them is gone.
        """
        told, shares = all_gather_cpu(self._groups, sums), self._tokens_shared_by
        # Added up in one order, so that all come to the same.
        sides = [torch.stack(told[first : first + shares]).sum(dim=0) for first in range(0, len(told), shares)]
        return AllReduced(sides[self._groups.place // shares], torch.cat(sides))

    @property
    def _tokens_shared_by(self) -> int:
        """How many workers share the tokens of a lane: neighbours in the group."""
        return self._groups.mesh.ring * self._groups.mesh.ulysses
