"""Worker layouts: checks, the rule for choosing one, and descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import gcd

from ...plan import Budgets, Candidates, DoesNotFitError, Machine, memory_budget
from ...schema import Mesh, MeshError, largest_share
from ...schema.refs import WHOLE_WEIGHTS, WeightPlacement
from ...shapes import HEAD_DIM, PATCH, PIXELS_PER_LATENT, RunShape
from .stages import stage_boundaries
from .worker_share import worker_share


def check_layout(mesh: Mesh, run: RunShape, samples: int) -> tuple[str, ...]:
    """Return warnings for a run on `mesh`, one line for each reason why workers idle at times.

    Args:
        mesh: the requested layout.
        run: the lanes in one worker group, with all tokens and steps in the run.
        samples: number of videos: samples in the request, or items in the queue.

    Raises:
        MeshError: the mesh cannot run, or workers are always idle or repeat other workers' work.
    """
    lanes = {expert: run.lanes[expert] for expert in run.experts_of_steps}
    if refusal := next(_refusals(mesh, run, max(lanes.values()), samples), None):
        raise MeshError(refusal)
    stage_boundaries(run.experts_of_steps, [1.0] * len(run.experts_of_steps), mesh.stage)
    return tuple(_idle_at_times(mesh, lanes, samples))


def _refusals(mesh: Mesh, run: RunShape, lanes: int, samples: int) -> Iterator[str]:
    """Yield the reasons why `mesh` cannot run, or wastes workers in every step.

    A step has at most `lanes` lanes.
    """
    if (heads := _heads(run)) % mesh.ulysses:
        yield f"ulysses {mesh.ulysses} does not divide {heads} heads: {_list_divisors(heads)}"
    parts = mesh.ring * mesh.ulysses
    # Ulysses without a ring splits any number of tokens. A ring needs equal parts.
    # The sides of a guided run may have different references.
    common = gcd(*run.tokens_of_sides)
    fewest = min(run.tokens_of_sides)
    if (mesh.ring > 1 and common % parts) or fewest < parts:
        degrees = (
            f"ring {mesh.ring} x ulysses {mesh.ulysses} = {parts}"
            if mesh.ring > 1
            else f"ulysses {parts}"
        )
        remedy = "" if run.video_tokens % parts else _scale_references(run, parts)
        yield f"{degrees} does not divide {_token_words(run)}: {_list_divisors(common)}{remedy}"
    if mesh.cfg > 1 and lanes < 2:
        yield (
            f"cfg {mesh.cfg}, but guidance is 1 under every expert, so each step has one lane and "
            "half of the workers would repeat the work of the other half: use cfg 1, or another "
            "guidance"
        )
    if mesh.data > 1 and samples == 1:
        idle = mesh.size - mesh.size // mesh.data
        yield (
            f"data {mesh.data}, but one video is made: {idle} of {mesh.size} workers would be "
            "idle; use data 1, or make several videos"
        )


def _idle_at_times(mesh: Mesh, lanes: Mapping[str, int], samples: int) -> Iterator[str]:
    if mesh.data > samples:
        idle = mesh.data - samples
        yield (
            f"data {mesh.data} for {samples} videos: {idle} of {mesh.data} rows of workers are idle"
        )
    if mesh.stage > 1 and samples < mesh.stage * mesh.data:
        yield (
            f"stage {mesh.stage} x data {mesh.data} for {samples} video{'s' * (samples != 1)}: "
            f"at most {samples} of {mesh.stage * mesh.data} groups work at a time"
        )
    single = [expert for expert, count in lanes.items() if count < 2]
    if mesh.cfg > 1 and single:
        yield (
            f"cfg {mesh.cfg}: the {single[0]} expert has one lane, so in its steps both sides "
            "compute the same"
        )


TOKEN_SHARING_COST = 0.1
"""Share of a step spent on token exchanges: 9.5 % with Ulysses 4 over PCIe 4.0
(docs/scaling.md)."""


def choose_layout(
    workers: int,
    run: RunShape,
    machine: Machine,
    budgets: Budgets,
    *,
    samples: int = 1,
    workers_per_machine: int = 8,
    weights: WeightPlacement = WHOLE_WEIGHTS,
) -> Mesh:
    """Return the best layout for exactly `workers` workers within memory, by `_order`.

    Args:
        workers: number of workers, all equal.
        run: one video on one worker: all tokens, all lanes for one sample.
        machine: rates for one GPU. All workers on a machine share RAM and disk.
        budgets: memory for a run: VRAM per worker, RAM for all workers on a machine together.
        samples: number of videos.
        workers_per_machine: number of workers on the same machine.
        weights: weight placement.

    Raises:
        MeshError: no layout divides the run evenly among so many workers.
        DoesNotFitError: no layout fits into memory.
    """
    if workers < 1 or samples < 1:
        raise MeshError(f"{workers} workers for {samples} videos: give 1 or more of both")
    meshes = list(_layouts(workers, run, samples, rings=machine.has_bus))
    if not meshes:
        raise MeshError(_no_layout(workers, run, samples, rings=machine.has_bus))
    meshes.sort(key=lambda mesh: _order(mesh, run, samples, workers_per_machine))
    shortages: list[str] = []
    for mesh in meshes:
        share = worker_share(
            mesh, run, machine, budgets, workers_per_machine=workers_per_machine, weights=weights
        )
        budget = memory_budget(share.machine, share.budgets)
        costs = cache(partial(share.run.costs, share.machine))
        fits, misfits = Candidates(costs=costs, chunks=share.run.chunks, budget=budget).fitting()
        if fits:
            return mesh
        least = min(misfits, key=lambda misfit: misfit.needs.device_bytes)
        of_mesh = f" of {mesh}" if mesh.size > 1 else ""
        shortages.append(f"{machine.name}, one worker{of_mesh}: {least.shortage}")
    raise DoesNotFitError(
        f"{shortages[0]}; make the video smaller or shorter, or share it among more workers"
    )


def _layouts(workers: int, run: RunShape, samples: int, *, rings: bool) -> Iterator[Mesh]:
    """Yield every valid one-stage mesh for so many workers. With `rings` also rings.

    Pipeline stages keep one expert in each worker, but a single video passes them one after the
    other. Users can choose stages, the rule never does.
    """
    divisors = [degree for degree in range(1, workers + 1) if workers % degree == 0]
    for cfg, ulysses, ring in product((1, 2), divisors, divisors if rings else (1,)):
        if workers % (cfg * ulysses * ring):
            continue
        mesh = Mesh(data=workers // (cfg * ulysses * ring), cfg=cfg, ring=ring, ulysses=ulysses)
        try:
            check_layout(mesh, run, samples)
        except MeshError:
            continue
        yield mesh


def _no_layout(workers: int, run: RunShape, samples: int, *, rings: bool) -> str:
    """Return the message for a number of workers without a layout."""
    fitting = next(
        count for count in range(workers, 0, -1) if any(_layouts(count, run, samples, rings=rings))
    )
    # If the video alone can be shared, the references are the cause.
    alone = replace(run, extra_tokens=())
    parts = [mesh.ring * mesh.ulysses for mesh in _layouts(workers, alone, samples, rings=rings)]
    remedy = _scale_references(run, min(parts)) if parts else ""
    return (
        f"{workers} workers cannot share {samples} video{'s' * (samples != 1)} of "
        f"{_token_words(run)} and {_heads(run)} heads evenly: use {fitting}{remedy}"
    )


def _order(mesh: Mesh, run: RunShape, samples: int, workers_per_machine: int) -> tuple[float, ...]:
    """Return the sort key for a layout, best first.

    It is the worker-seconds, then the traffic between workers and machines.
    """
    # A worker group computes this many videos, one after the other.
    rounds = -(-samples // mesh.data)
    lanes = [run.lane_tokens(expert) for expert in run.experts_of_steps]
    shares = [largest_share(lane_tokens, mesh.cfg) for lane_tokens in lanes]
    sides = mesh.cfg * _flops(run, shares) / _flops(run, lanes)
    sharing = mesh.ring * mesh.ulysses > 1
    seconds = rounds * mesh.data * sides * (1 + TOKEN_SHARING_COST * sharing)
    # `%` and not a comparison: a Ulysses group crosses machines unless its size divides the workers
    # of one.
    spans_machines = mesh.size > workers_per_machine and workers_per_machine % mesh.ulysses != 0
    # Among equally fast ones: within machines, small rings, many videos at a time.
    return (seconds, spans_machines, mesh.ring, -mesh.data, -mesh.cfg)


def _flops(run: RunShape, steps: Sequence[Sequence[int]]) -> int:
    """Return the operations in one block over all steps, from the tokens in each lane."""
    return sum(run.expert.block_flops(tokens) for lane_tokens in steps for tokens in lane_tokens)


def _heads(run: RunShape) -> int:
    return max(1, run.expert.width // HEAD_DIM)


MAX_LISTED_DEGREE = 16
"""Largest degree in a proposal."""


def _list_divisors(number: int) -> str:
    """Return the divisors of `number` as the end of a message: `2, 4, 8 do`."""
    divisors = [str(degree) for degree in range(2, MAX_LISTED_DEGREE + 1) if number % degree == 0]
    if not divisors:
        return "only 1 does"
    return f"{', '.join(divisors)} {'do' if len(divisors) > 1 else 'does'}"


SIDE_NAMES = {2: ("positive", "negative"), 3: ("positive", "without context", "negative")}
"""Names for the CFG sides in a step, in lane order, by their number."""


def _token_words(run: RunShape) -> str:
    """Return the number of tokens per lane.

    It is `30 tokens (positive) and 27 (negative)` if the sides differ.
    """
    named: dict[int, list[str]] = {}
    for name, extra in zip(
        SIDE_NAMES.get(len(run.extra_tokens), ()), run.extra_tokens, strict=False
    ):
        named.setdefault(run.video_tokens + extra, []).append(name)
    if len(named) < 2:
        return f"{run.tokens} tokens"
    words = [f"{tokens} ({', '.join(names)})" for tokens, names in named.items()]
    return " and ".join(words).replace(" (", " tokens (", 1)


def _scale_references(run: RunShape, parts: int) -> str:
    """Return the remedy for references that `parts` workers cannot share, as the end of a message.

    "" without references.
    """
    if not any(run.extra_tokens):
        return ""
    numbers = " and ".join(map(str, dict.fromkeys(filter(None, run.extra_tokens))))
    multiple = parts * PIXELS_PER_LATENT * PATCH[1]
    return (
        f"; {numbers} of them belong to sources and references: give every reference a side of a "
        f"multiple of {multiple} pixels (longest_side of WanStream Bernini scales larger ones down "
        "to it)"
    )


def describe_layout(mesh: Mesh) -> str:
    """Describe a layout: `cfg 2 x ulysses 4: both prompts side by side, the tokens of each ...`."""
    parts = []
    if mesh.data > 1:
        parts.append(f"{mesh.data} videos at a time")
    if mesh.cfg > 1:
        parts.append("both prompts side by side")
    if (sharing := mesh.ring * mesh.ulysses) > 1:
        parts.append(f"the tokens of each lane shared by {sharing} workers")
    return f"{mesh}: {', '.join(parts)}" if parts else str(mesh)
