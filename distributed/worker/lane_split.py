"""Parallel forward passes of a worker group: lanes are split over cfg ranks, tokens over ring and Ulysses ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...sampling import LOCAL_FORWARD, AllReduced, Compute, ParallelForward, Share, tokens_of
from ...wan import ExpertEngine, Lane
from .context_parallel import check_tokens, context_parallel
from .groups import all_gather_cpu

if TYPE_CHECKING:
    from .groups import ProcessGroups


def lanes_of_rank(count: int, cfg_rank: int) -> slice:
    """Return the lanes of a cfg rank: the first half or the last; with an odd count both compute the middle one.

    Lanes are in the order of `LaneInputs.lanes`, so the halves are the positive and the negative ones. Computing the
    middle lane twice costs no time, because the ranks wait for each other anyway, and keeps the shapes equal.
    """
    half = (count + 1) // 2
    return slice(0, half) if cfg_rank == 0 else slice(count - half, count)


def forward_shared(groups: ProcessGroups, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
    """Return the velocity of every lane: compute those of this cfg rank, and gather the others from its peer.

    All workers return the same bits.
    """
    group = groups.group("cfg")
    computed = torch.stack(compute(lanes[lanes_of_rank(len(lanes), dist.get_rank(group))]))
    halves = [torch.empty_like(computed) for _ in range(2)]
    dist.all_gather(halves, computed, group=group)
    groups.count_gathered(computed.nbytes)
    first, last = halves
    # The middle lane of an odd count is in both halves; the first one's is used, on all workers.
    return [*first, *last[2 * len(last) - len(lanes) :]]


class GroupForward:
    """Share of one worker in a group of two or more; see `ParallelForward`."""

    alone = False

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.share = Share(cfg=groups.mesh.cfg, ring=groups.mesh.ring, ulysses=groups.mesh.ulysses)

    def attached(self, engine: ExpertEngine) -> AbstractContextManager[object]:
        """See `ParallelForward.attached`. Raises MeshError if the mesh does not fit the experts or this device."""
        mesh = self._groups.mesh
        return nullcontext() if mesh.ring * mesh.ulysses == 1 else context_parallel(self._groups, engine)

    def forward(self, lanes: Sequence[Lane], compute: Compute) -> list[torch.Tensor]:
        """See `ParallelForward.forward`.

        Raises:
            MeshError: the tokens of a lane cannot be split evenly.
            WorkerTimeoutError: another worker did not respond within the rendezvous's timeout.
            PeerLostError: another worker is gone.
        """
        for lane in lanes:
            check_tokens(tokens_of(lane.latents.shape), self._groups)
        with self._groups.translate_errors("computed a step"):
            if self._groups.mesh.cfg == 1:
                return compute(lanes)
            return forward_shared(self._groups, lanes, compute)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `ParallelForward.own_tokens`; the split is that of diffusers' context parallelism."""
        shares = self._context_size
        if shares == 1:
            return tokens
        return tokens.chunk(shares, dim=1)[self._groups.group_rank % shares]

    def all_reduce_sums(self, sums: torch.Tensor) -> AllReduced:
        """See `ParallelForward.agreed`.

        Raises:
            WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
            PeerLostError: a worker is gone.
        """
        parts, shares = all_gather_cpu(self._groups, sums), self._context_size
        # Every worker adds in the same order, so the sums are bit-equal on all of them.
        totals = [torch.stack(parts[first : first + shares]).sum(dim=0) for first in range(0, len(parts), shares)]
        return AllReduced(totals[self._groups.group_rank // shares], torch.cat(totals))

    @property
    def _context_size(self) -> int:
        """Number of workers that share the tokens of a lane; their group ranks are consecutive."""
        return self._groups.mesh.ring * self._groups.mesh.ulysses


def group_forward(groups: ProcessGroups) -> ParallelForward:
    """Return the strategy by which this worker group shares forward passes."""
    return LOCAL_FORWARD if groups.size == 1 else GroupForward(groups)
