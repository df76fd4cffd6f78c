"""Gather interface for ranks that keep one shard of every block each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from ...plan.programs import BlockKey, TransferProgram
from ..formats.layout import ALIGNMENT


class GatherBrokenError(ConnectionError):
    """The ranks are out of sync or one of them is lost.

    They must join a new rendezvous before the next run.
    """


class ProgramMismatchError(ValueError):
    """The ranks are about to run different programs. The message names the ranks that differ."""


class StoppedTogether(Exception):
    """Base class for exceptions that end a run on all ranks in a group before the same visit.

    The ranks have then issued the same gathers and can start another run. After any other error
    they cannot.
    """


class Gather(Protocol):
    """Collectives in one group, as seen by one rank."""

    @property
    def rank(self) -> int:
        """Rank number in this process, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """Exchange messages of at most 64 bytes and return them by rank.

        Called on the compute thread before a run.

        Raises:
            GatherBrokenError: a rank is lost, or has not answered in time.
        """

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8, with `own` from every rank, by rank (fetch thread).

        `own` is 1-D uint8 with `into.numel() / size` bytes on the same device. On a CPU, `into` is
        filled on return. On a GPU the current stream orders the gather, and the host does not wait.

        Raises:
            GatherBrokenError: a rank is lost or did not join in time, or `abort` was called.
        """

    def abort(self) -> None:
        """Make pending and later gathers raise (any thread)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """Blocks sharded over the ranks in `gather`, one shard each."""

    gather: Gather
    on_device: bool = False
    """Keep shards in device memory after the first read. Otherwise in RAM or in files, according to
    the policy."""

    def resembles(self, other: Sharded) -> bool:
        """Return True if this rank has the same shards in both."""
        mine = self.gather
        theirs = other.gather
        return (mine.rank, mine.size, self.on_device) == (theirs.rank, theirs.size, other.on_device)


def shard_bytes(nbytes: int, size: int) -> int:
    """Return the bytes in one of `size` equal shards: a multiple of `ALIGNMENT`."""
    return -(-nbytes // (size * ALIGNMENT)) * ALIGNMENT


def shard_range(nbytes: int, rank: int, size: int) -> range:
    """Return the range of stored bytes in one rank's shard.

    The last shards may be shorter, or empty, and padded.
    """
    shard = shard_bytes(nbytes, size)
    return range(min(nbytes, rank * shard), min(nbytes, (rank + 1) * shard))


GATHERS_AHEAD = 3
"""Most gathers ahead of the visits.

A gather is issued once the visit has ended that needed the third gather before it. Ranks that stop
before the same visit then have few gathers left to issue before all have issued the same ones, even
if every block has a buffer.
"""


class GatheringState(Enum):
    """Group states: IDLE between runs, RUNNING in one, BROKEN once ranks are out of sync."""

    IDLE = "idle"
    RUNNING = "running"
    BROKEN = "broken"


class Gathering:
    """Group for one engine, and its state.

    Args:
        sharded: the ranks.
        nbytes: stored bytes per block.
    """

    def __init__(self, sharded: Sharded, nbytes: Mapping[BlockKey, int]) -> None:
        self.sharded = sharded
        self.state = GatheringState.IDLE
        self._nbytes = nbytes

    def shard_bytes(self, key: BlockKey) -> int:
        """Return the bytes in one shard of a block, equal on all ranks."""
        return shard_bytes(self._nbytes[key], self.sharded.gather.size)

    def gathered_bytes(self, key: BlockKey) -> int:
        """Return the bytes in all shards of a block, including padding."""
        return self.shard_bytes(key) * self.sharded.gather.size

    def begin(self, program: TransferProgram) -> None:
        """Start a run of `program` on all ranks.

        Raises:
            GatherBrokenError: the group is broken, or a rank does not answer.
            ProgramMismatchError: another rank is about to run another program.
        """
        if self.state is GatheringState.BROKEN:
            raise GatherBrokenError(
                "weight gathering is out of sync after an aborted run: restart the worker group"
            )
        assert self.state is GatheringState.IDLE, (
            f"a run started while the group was {self.state.value}"
        )
        gather = self.sharded.gather
        # Compared before the first gather, because ranks with different programs would gather wrong
        # weights, or deadlock.
        digests = gather.compare(self._digest(program))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[gather.rank]]
        if others:
            raise ProgramMismatchError(
                f"rank {gather.rank} of {gather.size} is about to stream other blocks than "
                f"{_ranks(others)}: give all workers of a group the same experts, request and "
                "policy, and restart the group after an error"
            )
        self.state = GatheringState.RUNNING

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`."""
        assert self.state is not GatheringState.IDLE, "all_gather was called outside a run"
        self.sharded.gather.all_gather(into, own)

    def end(self, *, in_sync: bool) -> None:
        """End the run.

        Unless all ranks have issued the same gathers (`in_sync`), abort pending gathers.
        """
        if self.state is not GatheringState.RUNNING:
            return
        if in_sync:
            self.state = GatheringState.IDLE
        else:
            self.state = GatheringState.BROKEN
            self.sharded.gather.abort()

    def _digest(self, program: TransferProgram) -> bytes:
        # Programs of two models can be equal, but blocks of other sizes cannot be gathered.
        nbytes = [self._nbytes[fetch.block.stored] for fetch in program.fetches]
        text = repr((program.visits, program.fetches, sorted(program.initial.items()), nbytes))
        return hashlib.sha256(text.encode()).digest()


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
