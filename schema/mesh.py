"""Mesh of workers along data, stage, cfg, ring and ulysses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields


class MeshError(ValueError):
    """Layout of workers that is invalid, or not suitable for the run; the message says why and names a valid one."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of workers along each axis. The last axis changes fastest from rank to rank.

    Raises MeshError for a degree below 1, and for a cfg degree other than 1 or 2.
    """

    data: int = 1
    stage: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees:
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise MeshError(f"{axis} is {degree!r}: give a whole number of 1 or more")
        if self.cfg > 2:
            raise MeshError(
                f"cfg is {self.cfg}: it divides the lanes of a step into two halves at most, so give 1 or 2"
            )

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """Pairs (axis, degree) from the outermost axis to the innermost."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def size(self) -> int:
        """Number of workers."""
        return math.prod(astuple(self))

    @property
    def cell_size(self) -> int:
        """Number of workers that compute one step together: a worker group."""
        return self.cfg * self.ring * self.ulysses

    def worker_group(self, data: int, stage: int) -> range:
        """Return the ranks of a worker group; the first one is its leader."""
        first = (data * self.stage + stage) * self.cell_size
        return range(first, first + self.cell_size)

    def worker_groups(self) -> Iterator[tuple[int, int]]:
        """Yield (data, stage) of every worker group, in order of rank."""
        return ((data, stage) for data in range(self.data) for stage in range(self.stage))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along that axis only, `rank` included, in order."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        place = [name for name, _ in self.degrees].index(axis)
        degree, distance = getattr(self, axis), math.prod(astuple(self)[place + 1 :])
        first = rank - rank // distance % degree * distance
        return tuple(range(first, first + degree * distance, distance))

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees if degree > 1) or "one worker"


def lanes_of_rank(count: int, cfg_rank: int, cfg: int = 2) -> slice:
    """Return the lanes of a cfg rank: the first half or the last; with an odd count both compute the middle one.

    Computing the middle lane twice costs no time, because the ranks wait for each other anyway, and every rank then
    contributes the same number of velocities.
    """
    half = -(-count // cfg)
    return slice(0, half) if cfg_rank == 0 else slice(count - half, count)


def largest_share(lane_tokens: Sequence[int], cfg: int) -> tuple[int, ...]:
    """Return the tokens of the lanes of the cfg rank that computes the most of them; `lane_tokens` has all lanes."""
    shares = [tuple(lane_tokens[lanes_of_rank(len(lane_tokens), rank, cfg)]) for rank in range(cfg)]
    return max(shares, key=sum)
