"""The layout of workers for a run: a rule, and the memory check of one worker.

Many videos go to workers of their own, between which hardly anything passes. One video is shared by the two sides of
its guidance, then by Ulysses inside a machine, then by a ring. The rule agrees with simulated layouts for 1 to 32 GPUs
(docs/scaling.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from .candidates import fitting_policies
from .machine import Machine
from .memory_needs import RAM_SHARE, DoesNotFitError, room_for
from .mesh import Mesh, MeshError
from .mesh_checks import check_mesh
from .offload_job import Budgets, OffloadJob
from .shapes import HEAD_DIM
from .stages import stage_boundaries
from .workers_ref import ON_DEVICE, WHOLE_WEIGHTS, WeightHome

TOKEN_SHARING_COST = 0.1
"""Share of a step that workers lose to exchanging tokens: 9.5 % with Ulysses 4 over PCIe 4.0 (docs/scaling.md)."""
AMPLE_BYTES = 2**60


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """Input of `plan_offload` for one worker of a mesh: its part of a run, and of its machine."""

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
    weights: WeightHome = WHOLE_WEIGHTS,
) -> Mesh:
    """The first layout of exactly `workers` workers, in the order of the rule, that fits into memory.

    Args:
        workers: number of workers, all alike.
        job: one video on one worker: all tokens, all lanes of one sample.
        machine: with the rates of one of its GPUs; its RAM and its disk are shared by all its workers.
        budgets: memory that a run may take: VRAM of each worker, RAM of all workers of a machine together.
        samples: videos that are made.
        workers_per_machine: how many are next to each other.
        weights: place of the weights.

    Raises MeshError when no layout suits that many workers, DoesNotFitError when there is too little memory for any.
    """
    if workers < 1 or samples < 1:
        raise MeshError(f"{workers} workers for {samples} videos: give 1 or more of both")
    rings = machine.computes_on == "cuda"
    meshes = list(_layouts(workers, job, samples, rings=rings))
    if not meshes:
        fitting = next(count for count in range(workers, 0, -1) if any(_layouts(count, job, samples, rings=rings)))
        raise MeshError(
            f"{workers} workers cannot share {samples} video{'s' * (samples != 1)} of {job.tokens} tokens and "
            f"{heads_of(job)} heads evenly: use {fitting}"
        )
    meshes.sort(key=lambda mesh: _order(mesh, job, samples, workers_per_machine))
    lacks: list[str] = []
    for mesh in meshes:
        share = worker_share(mesh, job, machine, budgets, workers_per_machine=workers_per_machine, weights=weights)
        fits, misfits = fitting_policies(share.job, share.machine, room_for(share.machine, share.budgets))
        if fits:
            return mesh
        least = min(misfits, key=lambda misfit: misfit.needs.device_bytes)
        of_mesh = f" of {mesh}" if mesh.size > 1 else ""
        lacks.append(f"{machine.name}, one worker{of_mesh}: {least.why}")
    raise DoesNotFitError(f"{lacks[0]}; make the video smaller or shorter, or share it among more workers")


def worker_share(
    mesh: Mesh,
    job: OffloadJob,
    machine: Machine,
    budgets: Budgets,
    *,
    workers_per_machine: int,
    weights: WeightHome = WHOLE_WEIGHTS,
) -> WorkerShare:
    """The part of `job` that one worker of `mesh` computes, in the stage with the most steps; else as `choose_layout`.

    Workers of one machine keep one copy of the weights in its RAM, and share its disk. On a CPU they share all of it.
    """
    parts = stage_boundaries(job.experts_of_steps, [1.0] * len(job.experts_of_steps), mesh.stage)
    steps = max(parts, key=len)
    experts = job.experts_of_steps[steps.start : steps.stop]
    lanes = {expert: -(-count // mesh.cfg) for expert, count in job.lanes.items() if expert in experts}
    worker = replace(
        job,
        tokens=job.tokens // (mesh.ring * mesh.ulysses),
        ring=mesh.ring,
        ulysses=mesh.ulysses,
        lanes=lanes,
        lanes_of_steps=(),
        experts_of_steps=experts,
        staying_bytes=job.staying_bytes * len(lanes) // len(job.lanes),
    )
    here = min(mesh.size, workers_per_machine)
    ram = RAM_SHARE * machine.ram_bytes if budgets.ram_bytes is None else budgets.ram_bytes
    ram = ram * len(lanes) / len(set(job.experts_of_steps))
    if weights == ON_DEVICE:
        shards = sum(worker.block_counts.values()) * worker.stored_bytes // mesh.cell_size
        worker, ram = replace(worker, staying_bytes=worker.staying_bytes + shards), AMPLE_BYTES
    own = replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s / here)
    if machine.computes_on == "cpu":
        own = replace(
            own,
            flops_per_s=machine.flops_per_s / here,
            decode_bytes_per_s=machine.decode_bytes_per_s / here,
            copy_bytes_per_s=machine.copy_bytes_per_s / here,
            quantise_bytes_per_s=machine.quantise_bytes_per_s / here,
        )
        ram /= here
    return WorkerShare(job=worker, machine=own, budgets=replace(budgets, ram_bytes=int(ram)))


def describe_layout(mesh: Mesh) -> str:
    """`cfg 2 x ulysses 4: both prompts side by side, the tokens of each shared by 4 workers`."""
    parts = []
    if mesh.data > 1:
        parts.append(f"{mesh.data} videos at a time")
    if mesh.cfg > 1:
        parts.append("both prompts side by side")
    if (sharing := mesh.ring * mesh.ulysses) > 1:
        parts.append(f"the tokens of each lane shared by {sharing} workers")
    return f"{mesh}: {', '.join(parts)}" if parts else str(mesh)


def heads_of(job: OffloadJob) -> int:
    """Attention heads of the job's experts."""
    return max(1, job.expert.width // HEAD_DIM)


def _layouts(workers: int, job: OffloadJob, samples: int, *, rings: bool) -> Iterator[Mesh]:
    """Every mesh of that many workers with one stage that suits the run; rings only where they can be computed.

    Stages keep an expert in each worker, but one waits for the other: users choose them, the rule does not.
    """
    divisors = [degree for degree in range(1, workers + 1) if workers % degree == 0]
    for cfg, ulysses, ring in product((1, 2), divisors, divisors if rings else (1,)):
        if workers % (cfg * ulysses * ring):
            continue
        mesh = Mesh(data=workers // (cfg * ulysses * ring), cfg=cfg, ring=ring, ulysses=ulysses)
        try:
            check_mesh(
                mesh,
                workers=workers,
                heads=heads_of(job),
                tokens=job.tokens,
                lanes=_lanes(job),
                steps=len(job.experts_of_steps),
                samples=samples,
            )
        except MeshError:
            continue
        yield mesh


def _order(mesh: Mesh, job: OffloadJob, samples: int, workers_per_machine: int) -> tuple[float, ...]:
    """Key for sorting layouts, the best first: worker-seconds, then what passes between workers and machines."""
    experts, lanes = job.experts_of_steps, job.lanes
    rounds = -(-samples // mesh.data)
    sides = mesh.cfg * sum(-(-lanes[expert] // mesh.cfg) for expert in experts) / sum(lanes[e] for e in experts)
    sharing = mesh.ring * mesh.ulysses > 1
    seconds = rounds * mesh.data * sides * (1 + TOKEN_SHARING_COST * sharing)
    spans_machines = mesh.size > workers_per_machine and workers_per_machine % mesh.ulysses != 0
    return (seconds, spans_machines, mesh.ring, -mesh.data, -mesh.cfg)


def _lanes(job: OffloadJob) -> dict[str, int]:
    return {expert: job.lanes[expert] for expert in job.experts_of_steps}
