"""Gather interface of ranks that keep one shard of every block, and its order at the end of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from ...plan import BlockKey, TransferProgram
from ..formats.layout import ALIGNMENT


class GatherBrokenError(ConnectionError):
    """The ranks are no longer at the same block, or one of them is lost: they must meet anew before the next run."""


class ProgramMismatchError(ValueError):
    """The ranks are about to run different programs; says which ranks differ."""


class StoppedTogether(Exception):
    """Base of what ends a run between two visits on all ranks of a group, on all of them before the same visit.

    The ranks then issue the same gathers to the end and may go on together; after any other error they cannot.
    """


class Gather(Protocol):
    """The ranks of one group, as one of them sees the group."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """What every rank has said, by rank; at most 64 bytes each. The computing thread calls, before a run.

        Raises:
            GatherBrokenError: a rank is lost, or has not answered in time.
        """
        ...

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8, with the `own` of every rank, by rank. The fetch thread calls.

        `own` is 1-D uint8 of `into.numel() / size` bytes on the same device. On a CPU it has happened on return; on a
        GPU it is ordered by the current stream, and the host does not wait.

        Raises:
            GatherBrokenError: a rank is lost or has not come in time, or `abort` was called.
        """
        ...

    def abort(self) -> None:
        """Let whoever waits in a gather leave it (any thread); nothing can be gathered any more."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """Blocks of which each rank of `gather` keeps one shard."""

    gather: Gather
    on_device: bool = False
    """Whether shards stay in device memory once they were read; otherwise in RAM or in files, as the policy says."""

    def resembles(self, other: Sharded) -> bool:
        """Whether the shards of one are those of the other."""
        mine, theirs = self.gather, other.gather
        return (mine.rank, mine.size, self.on_device) == (theirs.rank, theirs.size, other.on_device)


def shard_bytes(nbytes: int, size: int) -> int:
    """Bytes of one of `size` equal shards of a block with `nbytes` stored bytes: a multiple of `ALIGNMENT`."""
    return -(-nbytes // (size * ALIGNMENT)) * ALIGNMENT


def shard_range(nbytes: int, rank: int, size: int) -> range:
    """Which of the stored bytes the shard of `rank` holds; the last shards may hold fewer, or none, and padding."""
    shard = shard_bytes(nbytes, size)
    return range(min(nbytes, rank * shard), min(nbytes, (rank + 1) * shard))


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
            raise ProgramMismatchError(
                f"rank {gather.rank} of {gather.size} is about to stream other blocks than {_ranks(others)}: give all "
                "workers of a group the same experts, request and policy, and let them meet anew after an error"
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
