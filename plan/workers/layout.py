"""Layout of workers for a run: validation, a rule, stages, memory of one worker, traffic between machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product
from math import gcd, inf, prod

from ...schema import (
    HEAD_DIM,
    ON_DEVICE,
    PATCH,
    PIXELS_PER_LATENT,
    WHOLE_WEIGHTS,
    Mesh,
    MeshError,
    WeightPlacement,
    format_seconds,
    format_size,
    largest_share,
)
from ..candidates import fitting_policies
from ..machine import Machine
from ..memory import RAM_SHARE, DoesNotFitError, memory_budget
from ..offload_job import Budgets, OffloadJob


def stage_boundaries(experts_of_steps: Sequence[str], step_costs_s: Sequence[float], stages: int) -> tuple[range, ...]:
    """Divide the steps into `stages` consecutive, non-empty ranges.

    With two or more stages no stage has steps of two experts, so that each worker keeps one expert. Of these divisions
    the result has the shortest slowest stage, which limits the throughput of a queue of videos.

    Args:
        experts_of_steps: expert of each step.
        step_costs_s: predicted seconds of each step, 0 or more.
        stages: number of stages.

    Raises:
        MeshError: for more stages than steps, or for fewer (but more than one) than changes of expert require.
    """
    steps = len(experts_of_steps)
    if len(step_costs_s) != steps:
        raise ValueError(f"{len(step_costs_s)} costs for {steps} steps: give one for each")
    if not 1 <= stages <= steps:
        raise MeshError(f"stage {stages} for {steps} step{'s' * (steps != 1)}: every stage needs one; use 1 to {steps}")
    if stages == 1:
        return (range(steps),)
    switches = [step for step, (last, now) in enumerate(pairwise(experts_of_steps), start=1) if last != now]
    if len(switches) >= stages:
        raise MeshError(
            f"the expert changes {len(switches)} times, so stages of one expert each are {len(switches) + 1}, not "
            f"{stages}: use 1, or {len(switches) + 1} to {steps}"
        )
    before = [0.0, *accumulate(step_costs_s)]

    @cache
    def divide(past: int, parts: int) -> tuple[float, int]:
        """Return the slowest part and the last cut of the best division of the steps before `past`."""
        # No part contains a switch, so the last one starts at the last switch at the earliest.
        earliest = max((switch for switch in switches if switch < past), default=0)
        if parts == 1:
            return inf if earliest else before[past], 0
        cuts = range(max(earliest, parts - 1), past)
        return min((max(divide(cut, parts - 1)[0], before[past] - before[cut]), cut) for cut in cuts)

    ends = [steps]
    for parts in range(stages, 0, -1):
        ends.append(divide(ends[-1], parts)[1])
    return tuple(range(first, past) for first, past in pairwise(reversed(ends)))


def part_sizes(batch: int, mesh: Mesh) -> list[int]:
    """Return the number of samples in each part of a request; the samples of one part are lanes of one pass.

    With several stages, every sample is a part, because a pipeline needs several items. Otherwise each data coordinate
    gets one part of about equal size, so that its weights are streamed once for all its samples.
    """
    if mesh.stage > 1:
        return [1] * batch
    parts = min(batch, mesh.data)
    each, more = divmod(batch, parts)
    return [each + (number < more) for number in range(parts)]


MAX_LISTED_DEGREE = 16
"""Largest degree that a message proposes."""


def check_layout(mesh: Mesh, job: OffloadJob, samples: int) -> tuple[str, ...]:
    """Return warnings for a run on `mesh`, one line for each reason for which workers are idle at times.

    Args:
        mesh: the requested layout.
        job: the lanes that a worker group computes together, with all tokens and steps of the run.
        samples: number of videos: samples of the request, or items of the queue.

    Raises:
        MeshError: for a mesh that cannot run, or on which workers are always idle or repeat the work of others.
    """
    lanes = {expert: job.lanes[expert] for expert in job.experts_of_steps}
    if refusal := next(_refusals(mesh, job, max(lanes.values()), samples), None):
        raise MeshError(refusal)
    stage_boundaries(job.experts_of_steps, [1.0] * len(job.experts_of_steps), mesh.stage)
    return tuple(_idle_at_times(mesh, lanes, samples))


def _refusals(mesh: Mesh, job: OffloadJob, lanes: int, samples: int) -> Iterator[str]:
    """Yield the reasons for which `mesh` cannot run, or wastes workers in every step of at most `lanes` lanes."""
    if (heads := _heads(job)) % mesh.ulysses:
        yield f"ulysses {mesh.ulysses} does not divide {heads} heads: {_list_divisors(heads)}"
    parts = mesh.ring * mesh.ulysses
    # Ulysses without a ring splits any number of tokens; a ring needs equal parts.
    # The sides of a guided run may have different references.
    common, fewest = gcd(*job.tokens_of_sides), min(job.tokens_of_sides)
    if (mesh.ring > 1 and common % parts) or fewest < parts:
        degrees = f"ring {mesh.ring} x ulysses {mesh.ulysses} = {parts}" if mesh.ring > 1 else f"ulysses {parts}"
        remedy = "" if job.video_tokens % parts else _scale_references(job, parts)
        yield f"{degrees} does not divide {_token_words(job)}: {_list_divisors(common)}{remedy}"
    if mesh.cfg > 1 and lanes < 2:
        yield (
            f"cfg {mesh.cfg}, but guidance is 1 under every expert, so each step has one lane and half of the workers "
            "would repeat the work of the other half: use cfg 1, or another guidance"
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


SIDE_NAMES = {2: ("positive", "negative"), 3: ("positive", "without context", "negative")}
"""Names of the CFG sides of a step, in the order of the lanes, by their number."""


def _token_words(job: OffloadJob) -> str:
    """Return the number of tokens of a lane: `30 tokens (positive) and 27 (negative)` if the sides differ."""
    named: dict[int, list[str]] = {}
    for name, extra in zip(SIDE_NAMES.get(len(job.extra_tokens), ()), job.extra_tokens, strict=False):
        named.setdefault(job.video_tokens + extra, []).append(name)
    if len(named) < 2:
        return f"{job.tokens} tokens"
    first, *others = ((tokens, ", ".join(names)) for tokens, names in named.items())
    return " and ".join([f"{first[0]} tokens ({first[1]})", *(f"{tokens} ({names})" for tokens, names in others)])


def _scale_references(job: OffloadJob, parts: int) -> str:
    """Return the remedy for references that `parts` workers cannot share, as the end of a message; "" without any."""
    if not any(job.extra_tokens):
        return ""
    numbers = " and ".join(map(str, dict.fromkeys(filter(None, job.extra_tokens))))
    multiple = parts * PIXELS_PER_LATENT * PATCH[1]
    return (
        f"; {numbers} of them belong to sources and references: give every reference a side of a multiple of "
        f"{multiple} pixels (longest_side of WanStream Bernini scales larger ones down to it)"
    )


TOKEN_SHARING_COST = 0.1
"""Share of a step that workers lose to exchanging tokens: 9.5 % with Ulysses 4 over PCIe 4.0 (docs/scaling.md)."""
UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """Input of `plan_offload` for one worker of a mesh: its part of the run and of the machine."""

    job: OffloadJob
    machine: Machine
    budgets: Budgets


def choose_layout(
    workers: int,
    job: OffloadJob,
    machine: Machine,
    budgets: Budgets,
    *,
    samples: int = 1,
    workers_per_machine: int = 8,
    weights: WeightPlacement = WHOLE_WEIGHTS,
) -> Mesh:
    """Return the best layout of exactly `workers` workers that fits into memory, in the order of `_order`.

    Args:
        workers: number of workers, all of the same kind.
        job: one video on one worker: all tokens, all lanes of one sample.
        machine: rates of one GPU of a machine; all workers of the machine share its RAM and its disk.
        budgets: memory that a run may take: VRAM of each worker, RAM of all workers of a machine together.
        samples: number of videos.
        workers_per_machine: number of workers on the same machine.
        weights: placement of the weights.

    Raises:
        MeshError: if no layout divides the run evenly among that many workers.
        DoesNotFitError: if no layout fits into memory.
    """
    if workers < 1 or samples < 1:
        raise MeshError(f"{workers} workers for {samples} videos: give 1 or more of both")
    rings = machine.computes_on == "cuda"
    meshes = list(_layouts(workers, job, samples, rings=rings))
    if not meshes:
        raise MeshError(_no_layout(workers, job, samples, rings=rings))
    meshes.sort(key=lambda mesh: _order(mesh, job, samples, workers_per_machine))
    shortages: list[str] = []
    for mesh in meshes:
        share = worker_share(mesh, job, machine, budgets, workers_per_machine=workers_per_machine, weights=weights)
        fits, misfits = fitting_policies(share.job, share.machine, memory_budget(share.machine, share.budgets))
        if fits:
            return mesh
        least = min(misfits, key=lambda misfit: misfit.needs.device_bytes)
        of_mesh = f" of {mesh}" if mesh.size > 1 else ""
        shortages.append(f"{machine.name}, one worker{of_mesh}: {least.shortage}")
    raise DoesNotFitError(f"{shortages[0]}; make the video smaller or shorter, or share it among more workers")


def worker_share(
    mesh: Mesh,
    job: OffloadJob,
    machine: Machine,
    budgets: Budgets,
    *,
    workers_per_machine: int,
    weights: WeightPlacement = WHOLE_WEIGHTS,
) -> WorkerShare:
    """Return the part of `job` and `machine` of one worker in the stage with the most steps.

    Workers of one machine share its disk and one copy of the weights in its RAM. On a CPU they share all its rates.
    The arguments are those of `choose_layout`.
    """
    parts = stage_boundaries(job.experts_of_steps, [1.0] * len(job.experts_of_steps), mesh.stage)
    steps = max(parts, key=len)
    part = job.of_steps(steps)
    shares = {
        expert: largest_share(job.lane_tokens(expert), mesh.cfg)
        for expert in job.lanes
        if expert in part.experts_of_steps
    }
    lanes = {expert: len(share) for expert, share in shares.items()}
    most = next(share for share in shares.values() if len(share) == max(lanes.values()))
    video, *tokens = (
        -(-count // (mesh.ring * mesh.ulysses)) for count in (job.video_tokens, *sorted(most, reverse=True))
    )
    # The lanes of a rank need not be equally many of each side, so each of them is listed as a side.
    worker = replace(
        part,
        tokens=-(-job.tokens // (mesh.ring * mesh.ulysses)),
        extra_tokens=tuple(count - video for count in tokens) if len(set(tokens)) > 1 else (),
        sides=lanes,
        ring=mesh.ring,
        ulysses=mesh.ulysses,
        lanes=lanes,
        lanes_of_steps=(),
        sides_of_steps=(),
        resident_bytes=job.resident_bytes * len(lanes) // len(job.lanes),
    )
    here = min(mesh.size, workers_per_machine)
    ram = RAM_SHARE * machine.ram_bytes if budgets.ram_bytes is None else budgets.ram_bytes
    ram = ram * len(lanes) / len(set(job.experts_of_steps))
    if weights == ON_DEVICE:
        # Each worker keeps its shard of every block in VRAM, so RAM does not limit the policy.
        shards = sum(worker.block_counts.values()) * worker.stored_bytes // mesh.cell_size
        worker, ram = replace(worker, resident_bytes=worker.resident_bytes + shards), UNLIMITED_BYTES
    machine_share = replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s / here)
    if machine.computes_on == "cpu":
        machine_share = replace(
            machine_share,
            flops_per_s=machine.flops_per_s / here,
            decode_bytes_per_s=machine.decode_bytes_per_s / here,
            copy_bytes_per_s=machine.copy_bytes_per_s / here,
            quantise_bytes_per_s=machine.quantise_bytes_per_s / here,
        )
        ram /= here
    return WorkerShare(job=worker, machine=machine_share, budgets=replace(budgets, ram_bytes=int(ram)))


def describe_layout(mesh: Mesh) -> str:
    """Describe a layout: `cfg 2 x ulysses 4: both prompts side by side, the tokens of each lane shared by ...`."""
    parts = []
    if mesh.data > 1:
        parts.append(f"{mesh.data} videos at a time")
    if mesh.cfg > 1:
        parts.append("both prompts side by side")
    if (sharing := mesh.ring * mesh.ulysses) > 1:
        parts.append(f"the tokens of each lane shared by {sharing} workers")
    return f"{mesh}: {', '.join(parts)}" if parts else str(mesh)


@dataclass(frozen=True, kw_only=True)
class WireTraffic:
    """Traffic of one worker group between machines in a step with the most lanes."""

    bytes_by_axis: Mapping[str, int]
    """Bytes that one machine sends or receives, by axis; of the machine and direction with the most."""
    exchanges: int
    """Number of times that workers wait for those of another machine, the vote on a stop included."""

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_axis.values())


def wire_traffic(layout: Mesh, machines: Sequence[object], job: OffloadJob) -> WireTraffic | None:
    """Return the traffic of a worker group between machines; None if all of its workers are on one.

    In every block and lane, each worker sends every other one of its Ulysses group a share of q, k, v and the result of
    an attention, and every other one of its ring keys and values. Workers of the prompts (cfg) exchange one velocity
    per lane and step. Shards of weights are not counted.

    Args:
        layout: mesh of the group alone.
        machines: machine of each worker, by its rank in the group.
        job: the lanes that the group computes together, with all tokens.
    """
    assert len(machines) == layout.size == layout.cell_size, f"{len(machines)} machines for {layout}"
    if len(set(machines)) == 1:
        return None
    lanes = max((largest_share(job.lane_tokens(expert), layout.cfg) for expert in job.experts_of_steps), key=sum)
    visits = len(lanes) * job.expert.blocks
    hidden = sum(lanes) * job.expert.blocks / (layout.ring * layout.ulysses) * job.expert.width * job.value_bytes
    velocity = job.video_tokens * prod(PATCH) * job.expert.out_channels * job.value_bytes
    sent = {"ulysses": 4 * hidden / layout.ulysses, "ring": 2 * hidden, "cfg": len(lanes) * velocity}
    waits = {"ulysses": 4 * visits, "ring": visits, "cfg": 1}
    totals: dict[tuple[object, str], Counter[str]] = {}
    for axis, rank in product(sent, range(layout.size)):
        for other in layout.group(axis, rank):
            if machines[other] != machines[rank]:
                for end in ((machines[rank], "sends"), (machines[other], "receives")):
                    totals.setdefault(end, Counter())[axis] += round(sent[axis])
    most = max(totals.values(), key=Counter.total, default=Counter())
    crossed = {axis for total in totals.values() for axis in total}
    return WireTraffic(bytes_by_axis=dict(most), exchanges=1 + sum(waits[axis] for axis in crossed))


ASSUMED_LINK = 125_000_000
"""Bytes per second of a network whose card reports no speed: 1 Gb/s."""


def describe_wire(traffic: WireTraffic, link_bytes_per_s: int) -> str:
    """Describe the cost of a group that is apart; `link_bytes_per_s` 0 stands for a card that reports no speed."""
    rate = link_bytes_per_s or ASSUMED_LINK
    source = "the link speed of the network card" if link_bytes_per_s else "assumed: the network card reports none"
    axes = ", ".join(f"{axis} {format_size(nbytes)}" for axis, nbytes in traffic.bytes_by_axis.items())
    remedy = "" if traffic.bytes_by_axis.keys() <= {"cfg"} else "; only data or cfg between the machines costs less"
    return (
        f"each step moves {format_size(traffic.bytes)} between the machines ({axes}) in {traffic.exchanges} exchanges, "
        f"at least {format_seconds(traffic.bytes / rate)} s at {8 * rate / 1e9:g} Gb/s ({source}){remedy}"
    )


def _layouts(workers: int, job: OffloadJob, samples: int, *, rings: bool) -> Iterator[Mesh]:
    """Yield every mesh of that many workers with one stage that is valid for the run; with `rings` also rings.

    Pipeline stages keep one expert in each worker, but a single video passes them one after the other: users choose
    them, the rule does not.
    """
    divisors = [degree for degree in range(1, workers + 1) if workers % degree == 0]
    for cfg, ulysses, ring in product((1, 2), divisors, divisors if rings else (1,)):
        if workers % (cfg * ulysses * ring):
            continue
        mesh = Mesh(data=workers // (cfg * ulysses * ring), cfg=cfg, ring=ring, ulysses=ulysses)
        try:
            check_layout(mesh, job, samples)
        except MeshError:
            continue
        yield mesh


def _no_layout(workers: int, job: OffloadJob, samples: int, *, rings: bool) -> str:
    """Return the message for a number of workers that no layout has."""
    fitting = next(count for count in range(workers, 0, -1) if any(_layouts(count, job, samples, rings=rings)))
    alone = replace(job, tokens=job.video_tokens, extra_tokens=())
    parts = [mesh.ring * mesh.ulysses for mesh in _layouts(workers, alone, samples, rings=rings)]
    remedy = _scale_references(job, min(parts)) if parts else ""
    return (
        f"{workers} workers cannot share {samples} video{'s' * (samples != 1)} of {_token_words(job)} and "
        f"{_heads(job)} heads evenly: use {fitting}{remedy}"
    )


def _order(mesh: Mesh, job: OffloadJob, samples: int, workers_per_machine: int) -> tuple[float, ...]:
    """Return the sort key of a layout, the best first: worker-seconds, then traffic between workers and machines."""
    rounds = -(-samples // mesh.data)
    lanes = [job.lane_tokens(expert) for expert in job.experts_of_steps]
    shares = [largest_share(lane_tokens, mesh.cfg) for lane_tokens in lanes]
    sides = mesh.cfg * _flops(job, shares) / _flops(job, lanes)
    sharing = mesh.ring * mesh.ulysses > 1
    seconds = rounds * mesh.data * sides * (1 + TOKEN_SHARING_COST * sharing)
    spans_machines = mesh.size > workers_per_machine and workers_per_machine % mesh.ulysses != 0
    return (seconds, spans_machines, mesh.ring, -mesh.data, -mesh.cfg)


def _flops(job: OffloadJob, steps: Sequence[Sequence[int]]) -> int:
    """Return the operations of one block in steps with lanes of these tokens."""
    return sum(job.expert.block_flops(tokens) for lane_tokens in steps for tokens in lane_tokens)


def _heads(job: OffloadJob) -> int:
    return max(1, job.expert.width // HEAD_DIM)
