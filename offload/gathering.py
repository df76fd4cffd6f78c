"""How far the ranks of a group are with each other, seen from one engine.

    APART --begin--> TOGETHER --end(alike=True)--> APART
                         |
                         +--end(alike=False)--> BROKEN

They come together at the beginning of a run, by comparing their programs. A run that all ranks end at the same visit
leaves them at the same gather, and they may come together again. After any other end one of them may have issued a
gather that another one has not: the group is of no use any more, and only another one, of another meeting, is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum

import torch

from ..plan import BlockKey, TransferProgram
from .gather import DifferentRunsError, GatherBrokenError, Sharded

GATHERS_AHEAD = 3
"""A block is gathered when the visit is over that the third gather before it was for. So ranks that stop before the
same visit have few gathers left until all have issued the same ones, also where all blocks have a buffer."""


class GatheringState(Enum):
    APART = "apart"
    TOGETHER = "together"
    BROKEN = "broken"


class Gathering:
    """The group of one engine.

    Args:
        sharded: who the ranks are.
        nbytes: stored bytes of every block.
    """

    def __init__(self, sharded: Sharded, nbytes: Mapping[BlockKey, int]) -> None:
        self.sharded = sharded
        self.state = GatheringState.APART
        self._nbytes = nbytes

    def begin(self, program: TransferProgram) -> None:
        """A run of `program` begins on all ranks.

        Raises:
            GatherBrokenError: the group is broken, or a rank does not answer.
            DifferentRunsError: another rank is about to run another program.
        """
        if self.state is GatheringState.BROKEN:
            raise GatherBrokenError(
                "the workers that gather weights were not at the same block when a run ended: let them meet anew"
            )
        assert self.state is GatheringState.APART, f"a run began while the ranks were {self.state.value}"
        gather = self.sharded.gather
        said = gather.compare(self._digest(program))
        if others := [rank for rank, digest in enumerate(said) if digest != said[gather.rank]]:
            raise DifferentRunsError(
                f"rank {gather.rank} of {gather.size} is about to stream other blocks than {_ranks(others)}: give all "
                "workers of a cell the same experts, request and policy, and let them meet anew after an error"
            )
        self.state = GatheringState.TOGETHER

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`."""
        assert self.state is not GatheringState.APART, "nothing is gathered outside a run"
        self.sharded.gather.all_gather(into, own)

    def end(self, *, alike: bool) -> None:
        """The run is over; unless all ranks have issued the same gathers (`alike`), whoever waits in one leaves it."""
        if self.state is not GatheringState.TOGETHER:
            return
        if alike:
            self.state = GatheringState.APART
        else:
            self.state = GatheringState.BROKEN
            self.sharded.gather.abort()

    def _digest(self, program: TransferProgram) -> bytes:
        nbytes = [self._nbytes[fetch.block] for fetch in program.fetches]
        text = repr((program.visits, program.fetches, sorted(program.initial.items()), nbytes))
        return hashlib.sha256(text.encode()).digest()


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
