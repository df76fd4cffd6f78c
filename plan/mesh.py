"""Which worker does what: workers laid out along data, stage, cfg, ring and ulysses.

* data: samples and queue items of their own;
* stage: a range of steps; videos move from one stage to the next;
* cfg: the lanes under the positive text, and those under the negative one;
* ring and ulysses: the tokens of every lane (context parallelism).

A *cell* is all workers of one data and one stage coordinate: they compute the same steps of the same video together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace


class MeshError(ValueError):
    """Workers that cannot be laid out like this, or not for this run; the message says why, and what fits."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where a worker stands, each counted from 0."""

    data: int = 0
    stage: int = 0
    cfg: int = 0
    ring: int = 0
    ulysses: int = 0


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many workers there are along each axis. The last axis changes fastest from rank to rank.

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
                raise MeshError(f"{axis} is {degree!r}: give a whole number from 1")
        if self.cfg > 2:
            raise MeshError(f"cfg is {self.cfg}: there are two sides, positive and negative, so 1 or 2")

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """(axis, degree) from the outermost to the innermost."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def size(self) -> int:
        """How many workers it takes."""
        return math.prod(astuple(self))

    @property
    def cell_size(self) -> int:
        """How many workers compute one step together."""
        return self.cfg * self.ring * self.ulysses

    def coordinates(self, rank: int) -> Coordinates:
        """Where the worker with that rank stands."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        at = {}
        for axis, degree in reversed(self.degrees):
            rank, at[axis] = divmod(rank, degree)
        return Coordinates(**at)

    def rank(self, at: Coordinates) -> int:
        """The rank of the worker that stands there."""
        number = 0
        for axis, degree in self.degrees:
            number = number * degree + getattr(at, axis)
        return number

    def cell(self, data: int, stage: int) -> range:
        """The ranks of a cell; the first one of them leads it."""
        first = self.rank(Coordinates(data=data, stage=stage))
        return range(first, first + self.cell_size)

    def cells(self) -> Iterator[tuple[int, int]]:
        """(data, stage) of every cell, in the order of ranks."""
        return ((data, stage) for data in range(self.data) for stage in range(self.stage))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along that axis only, itself among them, in order."""
        own = self.coordinates(rank)
        assert axis in dict(self.degrees), f"{axis} is no axis"
        return tuple(self.rank(replace(own, **{axis: at})) for at in range(getattr(self, axis)))

    def __str__(self) -> str:
        words = [f"{axis} {degree}" for axis, degree in self.degrees if degree > 1]
        return " x ".join(words) or "one worker"
