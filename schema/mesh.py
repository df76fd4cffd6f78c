"""Worker mesh along data, stage, cfg, ring and ulysses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields


class MeshError(ValueError):
    """Worker layout that is invalid, or not suitable for the run.

    The message says why and names a valid one.
    """


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Worker count along each axis. The last axis changes fastest from rank to rank.

    Raises MeshError for a degree below 1, and for a cfg degree other than 1 or 2.
    """

    # Ranks follow the order of these fields. Another order would renumber the workers.
    data: int = 1
    stage: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees:
            # bool is a subclass of int, so True would pass as 1.
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise MeshError(f"{axis} is {degree!r}: give a whole number of 1 or more")
        if self.cfg > 2:
            raise MeshError(
                f"cfg is {self.cfg}: it divides the lanes of a step into two halves at most, so "
                "give 1 or 2"
            )

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """Pairs (axis, degree), outermost axis first."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def size(self) -> int:
        """Worker count."""
        return math.prod(astuple(self))

    @property
    def cell_size(self) -> int:
        """Worker group size: the workers that compute one step together."""
        return self.cfg * self.ring * self.ulysses

    def worker_group(self, data: int, stage: int) -> range:
        """Return the ranks in a worker group. The first one is the leader."""
        first = (data * self.stage + stage) * self.cell_size
        return range(first, first + self.cell_size)

    def worker_groups(self) -> Iterator[tuple[int, int]]:
        """Yield (data, stage) for every worker group, in rank order."""
        return ((data, stage) for data in range(self.data) for stage in range(self.stage))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks along one axis through `rank`, in order, including `rank`."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        place = [name for name, _ in self.degrees].index(axis)
        degree = getattr(self, axis)
        distance = math.prod(astuple(self)[place + 1 :])
        # `rank // distance % degree` is the position along the axis, `distance` the step between
        # ranks.
        first = rank - rank // distance % degree * distance
        return tuple(range(first, first + degree * distance, distance))

    def __str__(self) -> str:
        return (
            " x ".join(f"{axis} {degree}" for axis, degree in self.degrees if degree > 1)
            or "one worker"
        )


def lanes_of_rank(count: int, cfg_rank: int, cfg: int = 2) -> slice:
    """Return the lanes for a cfg rank: the first half or the last.

    With an odd count both ranks compute the middle lane. This costs no time, because the ranks wait
    for each other anyway, and every rank then contributes the same number of velocities.
    """
    # Rounded up, so both halves of an odd count include the middle lane.
    half = -(-count // cfg)
    if cfg_rank == 0:
        return slice(0, half)
    return slice(count - half, count)


def largest_share(lane_tokens: Sequence[int], cfg: int) -> tuple[int, ...]:
    """Return the lane tokens for the cfg rank with the most tokens.

    `lane_tokens` has all lanes.
    """
    shares = [tuple(lane_tokens[lanes_of_rank(len(lane_tokens), rank, cfg)]) for rank in range(cfg)]
    return max(shares, key=sum)
