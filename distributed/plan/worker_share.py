"""One worker's part in a run and a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...plan import RAM_SHARE, Budgets, Machine
from ...schema import Mesh, largest_share
from ...schema.refs import ON_DEVICE, WHOLE_WEIGHTS, WeightPlacement
from ...shapes import RunShape
from .stages import stage_boundaries

UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """Input to `plan_offload` for one worker in a mesh: a part of the run and of the machine."""

    run: RunShape
    machine: Machine
    budgets: Budgets


def worker_share(
    mesh: Mesh,
    run: RunShape,
    machine: Machine,
    budgets: Budgets,
    *,
    workers_per_machine: int,
    weights: WeightPlacement = WHOLE_WEIGHTS,
) -> WorkerShare:
    """Return one worker's part in `run` and `machine`, for the stage with the most steps.

    Workers on one machine share the disk and one copy of the weights in RAM. On a CPU they share
    all rates. The arguments are as in `choose_layout`.
    """
    parts = stage_boundaries(run.experts_of_steps, [1.0] * len(run.steps), mesh.stage)
    part = run.of_steps(max(parts, key=len))
    shares = {
        expert: largest_share(run.lane_tokens(expert), mesh.cfg)
        for expert in set(part.experts_of_steps)
    }
    lanes = {expert: len(shares[expert]) for expert in run.sides if expert in shares}
    most = next(shares[expert] for expert in lanes if lanes[expert] == max(lanes.values()))
    sharing = mesh.ring * mesh.ulysses
    video_tokens = -(-run.tokens // sharing)
    extra_tokens: tuple[int, ...] = ()
    if len(set(most)) > 1:
        video_tokens = -(-run.video_tokens // sharing)
        # The longest lanes come first: an expert with fewer lanes counts these, an upper bound.
        extra_tokens = tuple(
            -(-tokens // sharing) - video_tokens for tokens in sorted(most, reverse=True)
        )
    blocks = replace(
        run.blocks,
        stacks=tuple(lanes),
        outside_bytes=run.blocks.outside_bytes * len(lanes) // len(run.sides),
    )
    here = min(mesh.size, workers_per_machine)
    ram = RAM_SHARE * machine.ram_bytes
    if budgets.ram_bytes is not None:
        ram = budgets.ram_bytes
    # Workers of other stages keep their experts in the same RAM.
    ram = ram * len(lanes) / len(set(run.experts_of_steps))
    if weights == ON_DEVICE:
        # Each worker keeps a shard of every block in VRAM, so RAM does not limit the policy.
        shards = len(lanes) * blocks.blocks * blocks.stored_bytes // mesh.cell_size
        blocks = replace(blocks, outside_bytes=blocks.outside_bytes + shards)
        ram = UNLIMITED_BYTES
    if not machine.has_bus:
        ram /= here
    # A rank may have more lanes from one side than from another, so each lane is listed as a side.
    worker = replace(
        part,
        blocks=blocks,
        steps=tuple(replace(step, samples=None, sides=None) for step in part.steps),
        video_tokens=video_tokens,
        extra_tokens=extra_tokens,
        samples=1,
        sides=lanes,
        workers=Mesh(ring=mesh.ring, ulysses=mesh.ulysses),
    )
    return WorkerShare(
        run=worker,
        machine=_machine_share(machine, here),
        budgets=replace(budgets, ram_bytes=int(ram)),
    )


def _machine_share(machine: Machine, workers: int) -> Machine:
    """Return the rates of one of `workers` on a machine.

    The workers share the disk, and on a CPU everything.
    """
    shared = ["disk_bytes_per_s"]
    if not machine.has_bus:
        shared += ["flops_per_s", "decode_bytes_per_s", "copy_bytes_per_s", "quantise_bytes_per_s"]
    return replace(machine, **{name: getattr(machine, name) / workers for name in shared})
