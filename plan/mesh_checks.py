"""Whether a mesh suits a run: heads, tokens, lanes, steps, videos and GPUs, each refusal with what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .mesh import Mesh, MeshError

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
        lanes: under each expert that runs, of what a cell computes at once: for one sample 1, or 2 where its guidance
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
            f"at most {samples} of {mesh.stage * mesh.data} cells work at a time"
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
