"""Mesh of workers along data, stage, cfg, ring and ulysses, and its validation against a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

    def worker_group(self, data: int, stage: int) -> range:
        """The ranks of a group; the first one of them leads it."""
        first = self.rank(Coordinates(data=data, stage=stage))
        return range(first, first + self.cell_size)

    def worker_groups(self) -> Iterator[tuple[int, int]]:
        """(data, stage) of every group, in the order of ranks."""
        return ((data, stage) for data in range(self.data) for stage in range(self.stage))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along that axis only, itself among them, in order."""
        own = self.coordinates(rank)
        assert axis in dict(self.degrees), f"{axis} is no axis"
        return tuple(self.rank(replace(own, **{axis: at})) for at in range(getattr(self, axis)))

    def __str__(self) -> str:
        words = [f"{axis} {degree}" for axis, degree in self.degrees if degree > 1]
        return " x ".join(words) or "one worker"


FEW = 16
"""Degrees up to which a message lists what would fit."""


def check_mesh(
    mesh: Mesh,
    *,
    workers: int,
    heads: int,
    tokens: int,
    lanes: Mapping[str, int],
    steps: int,
    samples: int = 1,
    gpus: int | None = None,
) -> tuple[str, ...]:
    """What is worth saying of a run on `mesh`, in words; nothing where every worker has work all the time.

    Args:
        mesh: the layout that is asked for.
        workers: how many there are.
        heads: attention heads of the experts (A14B: 40).
        tokens: length of the sequence of one lane.
        lanes: under each expert that runs, of what a group computes at once: for one sample 1, or 2 where its guidance
            is not 1; as many times that as samples go together.
        steps: of the whole run.
        samples: videos that are made: samples of the request, or items of the queue.
        gpus: how many there are; None where workers compute on CPUs.

    Raises MeshError for a mesh that cannot run, or on which workers would compute what others compute, or nothing.
    """
    for refusals in (
        _too_many_workers(mesh, workers, gpus),
        _heads_or_tokens_left(mesh, heads, tokens),
        _nothing_to_do(mesh, lanes, steps, samples),
    ):
        if refusal := next(refusals, None):
            raise MeshError(refusal)
    return tuple(_idle_at_times(mesh, lanes, samples))


def _too_many_workers(mesh: Mesh, workers: int, gpus: int | None) -> Iterator[str]:
    if gpus is not None and workers > gpus:
        yield f"{workers} workers, but {gpus} GPU{'s' * (gpus != 1)}: each worker takes one; use at most {gpus}"
    if mesh.size != workers:
        rest, left = divmod(workers, mesh.size // mesh.data)
        remedy = f", or data {rest}" if rest and not left else ""
        yield (
            f"{mesh}: a layout of {mesh.size}, but there are {workers} workers; "
            f"use {mesh.size} worker{'s' * (mesh.size != 1)}{remedy}"
        )


def _heads_or_tokens_left(mesh: Mesh, heads: int, tokens: int) -> Iterator[str]:
    if heads % mesh.ulysses:
        yield f"ulysses {mesh.ulysses} does not divide {heads} heads: {_dividing(heads)}"
    parts = mesh.ring * mesh.ulysses
    if tokens % parts:
        degrees = f"ring {mesh.ring} x ulysses {mesh.ulysses} = {parts}" if mesh.ring > 1 else f"ulysses {parts}"
        yield f"{degrees} does not divide {tokens} tokens: {_dividing(tokens)}"


def _nothing_to_do(mesh: Mesh, lanes: Mapping[str, int], steps: int, samples: int) -> Iterator[str]:
    if mesh.cfg > 1 and max(lanes.values()) < 2:
        yield (
            f"cfg {mesh.cfg}, but guidance is 1 under every expert, so each step has one lane and half of the workers "
            "would compute what the others compute: use cfg 1, or another guidance"
        )
    if mesh.stage > steps:
        yield (
            f"stage {mesh.stage}, but the run has {steps} step{'s' * (steps != 1)}: every stage needs one; "
            f"use 1 to {steps}"
        )
    if mesh.data > 1 and samples == 1:
        idle = mesh.size - mesh.size // mesh.data
        yield (
            f"data {mesh.data}, but one video is made: {idle} of {mesh.size} workers would have nothing to do; "
            "use data 1, or make several videos"
        )


def _idle_at_times(mesh: Mesh, lanes: Mapping[str, int], samples: int) -> Iterator[str]:
    if mesh.data > samples:
        idle = mesh.data - samples
        yield f"data {mesh.data} for {samples} videos: {idle} of {mesh.data} rows of workers have nothing to do"
    if mesh.stage > 1 and samples < mesh.stage * mesh.data:
        yield (
            f"stage {mesh.stage} x data {mesh.data} for {samples} video{'s' * (samples != 1)}: "
            f"at most {samples} of {mesh.stage * mesh.data} groups work at a time"
        )
    single = [expert for expert, count in lanes.items() if count < 2]
    if mesh.cfg > 1 and single:
        yield f"cfg {mesh.cfg}: the {single[0]} expert has one lane, so in its steps both sides compute the same"


def _dividing(whole: int) -> str:
    """Which degrees would do."""
    fitting = [str(degree) for degree in range(2, FEW + 1) if whole % degree == 0]
    if not fitting:
        return "only 1 does"
    return f"{', '.join(fitting)} {'do' if len(fitting) > 1 else 'does'}"
