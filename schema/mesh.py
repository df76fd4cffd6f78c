"""Mesh of workers along data, stage, cfg, ring and ulysses, and its validation against a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace


class MeshError(ValueError):
    """Layout of workers that is invalid, or not suitable for the run; the message says why and names a valid one."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Position of a worker along each axis, counted from 0."""

    data: int = 0
    stage: int = 0
    cfg: int = 0
    ring: int = 0
    ulysses: int = 0


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
            raise MeshError(f"cfg is {self.cfg}: there are two sides, positive and negative, so 1 or 2")

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

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of the worker with that rank."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        at = {}
        for axis, degree in reversed(self.degrees):
            rank, at[axis] = divmod(rank, degree)
        return Coordinates(**at)

    def rank(self, at: Coordinates) -> int:
        """Return the rank of the worker at those coordinates."""
        number = 0
        for axis, degree in self.degrees:
            number = number * degree + getattr(at, axis)
        return number

    def worker_group(self, data: int, stage: int) -> range:
        """Return the ranks of a worker group; the first one is its leader."""
        first = self.rank(Coordinates(data=data, stage=stage))
        return range(first, first + self.cell_size)

    def worker_groups(self) -> Iterator[tuple[int, int]]:
        """Yield (data, stage) of every worker group, in order of rank."""
        return ((data, stage) for data in range(self.data) for stage in range(self.stage))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along that axis only, `rank` included, in order."""
        coordinates = self.coordinates(rank)
        assert axis in dict(self.degrees), f"{axis} is not an axis"
        return tuple(self.rank(replace(coordinates, **{axis: at})) for at in range(getattr(self, axis)))

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees if degree > 1) or "one worker"


MAX_LISTED_DEGREE = 16
"""Largest degree that a message proposes."""


def check_mesh(
    mesh: Mesh,
    *,
    workers: int,
    heads: int,
    tokens: int,
    lanes: Mapping[str, int],
    steps: int,
    samples: int = 1,
) -> tuple[str, ...]:
    """Return warnings for a run on `mesh`, one line for each reason for which workers are idle at times.

    Args:
        mesh: the requested layout.
        workers: number of workers.
        heads: attention heads of the experts (A14B: 40).
        tokens: sequence length of one lane.
        lanes: lanes that a worker group computes together, for each expert that runs: per sample 1, or 2 if its
            guidance is not 1.
        steps: steps of the whole run.
        samples: number of videos: samples of the request, or items of the queue.

    Raises:
        MeshError: for a mesh that cannot run, or on which workers are always idle or repeat the work of others.
    """
    for refusals in (
        _wrong_worker_count(mesh, workers),
        _indivisible(mesh, heads, tokens),
        _always_idle(mesh, lanes, steps, samples),
    ):
        if refusal := next(refusals, None):
            raise MeshError(refusal)
    return tuple(_idle_at_times(mesh, lanes, samples))


def _wrong_worker_count(mesh: Mesh, workers: int) -> Iterator[str]:
    if mesh.size != workers:
        data, remainder = divmod(workers, mesh.size // mesh.data)
        remedy = f", or data {data}" if data and not remainder else ""
        yield (
            f"{mesh}: a layout of {mesh.size}, but there are {workers} workers; "
            f"use {mesh.size} worker{'s' * (mesh.size != 1)}{remedy}"
        )


def _indivisible(mesh: Mesh, heads: int, tokens: int) -> Iterator[str]:
    if heads % mesh.ulysses:
        yield f"ulysses {mesh.ulysses} does not divide {heads} heads: {_list_divisors(heads)}"
    parts = mesh.ring * mesh.ulysses
    if tokens % parts:
        degrees = f"ring {mesh.ring} x ulysses {mesh.ulysses} = {parts}" if mesh.ring > 1 else f"ulysses {parts}"
        yield f"{degrees} does not divide {tokens} tokens: {_list_divisors(tokens)}"


def _always_idle(mesh: Mesh, lanes: Mapping[str, int], steps: int, samples: int) -> Iterator[str]:
    if mesh.cfg > 1 and max(lanes.values()) < 2:
        yield (
            f"cfg {mesh.cfg}, but guidance is 1 under every expert, so each step has one lane and half of the workers "
            "would repeat the work of the other half: use cfg 1, or another guidance"
        )
    if mesh.stage > steps:
        yield (
            f"stage {mesh.stage}, but the run has {steps} step{'s' * (steps != 1)}: every stage needs one; "
            f"use 1 to {steps}"
        )
    if mesh.data > 1 and samples == 1:
        idle = mesh.size - mesh.size // mesh.data
        yield (
            f"data {mesh.data}, but one video is made: {idle} of {mesh.size} workers would be idle; "
            "use data 1, or make several videos"
        )


def _idle_at_times(mesh: Mesh, lanes: Mapping[str, int], samples: int) -> Iterator[str]:
    if mesh.data > samples:
        idle = mesh.data - samples
        yield f"data {mesh.data} for {samples} videos: {idle} of {mesh.data} rows of workers are idle"
    if mesh.stage > 1 and samples < mesh.stage * mesh.data:
        yield (
            f"stage {mesh.stage} x data {mesh.data} for {samples} video{'s' * (samples != 1)}: "
            f"at most {samples} of {mesh.stage * mesh.data} groups work at a time"
        )
    single = [expert for expert, count in lanes.items() if count < 2]
    if mesh.cfg > 1 and single:
        yield f"cfg {mesh.cfg}: the {single[0]} expert has one lane, so in its steps both sides compute the same"


def _list_divisors(number: int) -> str:
    """Return the degrees that divide `number` as the end of a message: `2, 4, 8 do`."""
    divisors = [str(degree) for degree in range(2, MAX_LISTED_DEGREE + 1) if number % degree == 0]
    if not divisors:
        return "only 1 does"
    return f"{', '.join(divisors)} {'do' if len(divisors) > 1 else 'does'}"
