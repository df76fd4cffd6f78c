"""What the engine asks of ranks that keep one share of every block each: to bring the shares of a block together.

A block's stored bytes are cut into `size` equal shards. Every rank reads its own from its files, and all of them gather
the whole block, one block after the other in the order in which their programs fetch them. That order is the same on
all ranks only if their programs are, so a run begins by comparing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .layout import ALIGNMENT


class GatherBrokenError(ConnectionError):
    """The ranks are no longer at the same block, or one of them is lost: they must meet anew before the next run."""


class DifferentRunsError(ValueError):
    """The ranks are about to run different programs; says which ranks differ."""


class StoppedAlike(Exception):
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
