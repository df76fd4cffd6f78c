"""How the weights can reach a worker of a cell: each way as a job and a machine that the planner knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .candidates import CHUNKS, device_choices, is_usual, least_seconds
from .fleet_exchange import gather_exchange, lane_exchange
from .links import Links
from .machine import Machine
from .memory_needs import RAM_SHARE, Room, memory_needs, room_for
from .mesh import Mesh
from .offload_job import Budgets, OffloadJob
from .residency import OffloadPolicy
from .workers_ref import ON_DEVICE, SHARDED, WHOLE_WEIGHTS, WeightHome


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of them, for a worker that makes two videos, one after the other."""

    weights: WeightHome
    policy: OffloadPolicy
    job: OffloadJob
    machine: Machine
    device_bytes: int
    least_s: float
    """To the millisecond."""


def ways_of(
    job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range, home: WeightHome
) -> Iterator[Way]:
    """Usual policies that fit, with weights out of RAM or from files."""
    if home != WHOLE_WEIGHTS and (mesh.cell_size == 1 or machine.computes_on == "cpu"):
        return
    worker = _with_shards(worker_job(job, mesh, steps), mesh, home)
    # Both videos in one program, as the engine keeps its buffers between items of a queue.
    worker = replace(worker, experts_of_steps=worker.experts_of_steps * 2)
    rated = _with_weights(worker_machine(job, machine, links, mesh), job, links, mesh, home)
    room = _room(job, machine, links, mesh, steps, home)
    for from_file in (False, True):
        if from_file and home == ON_DEVICE:
            continue
        reads = _reading(rated, links, mesh, home) if from_file else rated
        for policy, device_bytes in _fitting(worker, reads, room, from_file=from_file):
            least_s = round(least_seconds(worker, reads, policy) - 1e-6, 3)
            yield Way(
                weights=home, policy=policy, job=worker, machine=reads, device_bytes=device_bytes, least_s=least_s
            )


def _fitting(job: OffloadJob, machine: Machine, room: Room, *, from_file: bool) -> Iterator[tuple[OffloadPolicy, int]]:
    """Usual policies with as many tokens at once as fit. Part of the blocks in RAM is nothing that workers share."""
    for on_device in device_choices(job.expert.blocks):
        if not is_usual(on_device, job):
            continue
        for chunk in CHUNKS:
            policy = replace(on_device, source="file" if from_file else "pinned", chunk_tokens=chunk)
            if chunk is not None and chunk >= job.tokens:
                continue
            needs = memory_needs(job, machine, policy)
            if room.lacks(needs) is None:
                yield policy, needs.device_bytes
                break


def worker_job(job: OffloadJob, mesh: Mesh, steps: range) -> OffloadJob:
    """What one worker of a cell has to do of `steps`: some of the lanes, and some tokens of each."""
    experts = job.experts_of_steps[steps.start : steps.stop]
    lanes = {expert: -(-count // mesh.cfg) for expert, count in job.lanes.items() if expert in experts}
    return replace(
        job,
        tokens=job.tokens // (mesh.ring * mesh.ulysses),
        ring=mesh.ring,
        ulysses=mesh.ulysses,
        lanes=lanes,
        lanes_of_steps=(),
        experts_of_steps=experts,
        staying_bytes=job.staying_bytes * len(lanes) // len(job.lanes),
    )


def _with_shards(worker: OffloadJob, mesh: Mesh, home: WeightHome) -> OffloadJob:
    """`worker` with its share of all blocks in device memory, where that is their home."""
    if home != ON_DEVICE:
        return worker
    blocks = sum(worker.block_counts.values())
    return replace(worker, staying_bytes=worker.staying_bytes + blocks * worker.stored_bytes // mesh.cell_size)


def worker_machine(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh) -> Machine:
    """`machine` with the rates that one worker sees, its FLOPs slowed by what the cell exchanges in every block."""
    context = mesh.ring * mesh.ulysses
    here = _workers_here(links, mesh) if machine.computes_on == "cpu" else 1
    alone_s = job.expert.block_flops(job.tokens) / context / (machine.flops_per_s / here)
    lane_s = alone_s + lane_exchange(job, mesh, links).seconds
    return replace(
        machine,
        flops_per_s=job.expert.block_flops(job.tokens // context) / lane_s,
        h2d_bytes_per_s=_bus(machine, links, mesh, busy=1 - alone_s / lane_s),
        decode_bytes_per_s=machine.decode_bytes_per_s / here,
        copy_bytes_per_s=machine.copy_bytes_per_s / here,
        quantise_bytes_per_s=machine.quantise_bytes_per_s / _workers_here(links, mesh),
    )


def _bus(machine: Machine, links: Links, mesh: Mesh, *, busy: float) -> float | None:
    """What the bus gives one worker; nothing while others are told something over the same wires."""
    if machine.h2d_bytes_per_s is None:
        return None
    rate = min(machine.h2d_bytes_per_s, links.ram_bytes_per_s / _workers_here(links, mesh))
    return rate * (1 - busy) if links.shares_bus else rate


def _with_weights(machine: Machine, job: OffloadJob, links: Links, mesh: Mesh, home: WeightHome) -> Machine:
    """`machine` with a bus as fast as blocks arrive that way."""
    if home == WHOLE_WEIGHTS or machine.h2d_bytes_per_s is None:
        return machine
    gather_s = gather_exchange(mesh, links, job.stored_bytes).seconds
    own_s = job.stored_bytes / mesh.cell_size / machine.h2d_bytes_per_s if home == SHARDED else 0.0
    block_s = own_s + gather_s if links.shares_bus else max(own_s, gather_s)
    return replace(machine, h2d_bytes_per_s=job.stored_bytes / block_s)


def _reading(machine: Machine, links: Links, mesh: Mesh, home: WeightHome) -> Machine:
    """`machine` with what one worker has of the disk, where workers read past the page cache."""
    here = _workers_here(links, mesh)
    # Who reads a share only reads that many bytes less.
    readers = here if home == WHOLE_WEIGHTS else max(1, here // mesh.cell_size)
    return replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s / readers)


def _workers_here(links: Links, mesh: Mesh) -> int:
    return min(mesh.size, links.workers_per_machine)


def _room(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range, home: WeightHome) -> Room:
    """Of one worker. A machine keeps one copy of each expert, however many of its workers need it."""
    here = _workers_here(links, mesh)
    if home == ON_DEVICE:
        return replace(room_for(machine, Budgets()), host=float("inf"))
    experts = set(job.experts_of_steps[steps.start : steps.stop])
    ram = RAM_SHARE * machine.ram_bytes * len(experts) / len(set(job.experts_of_steps))
    if machine.computes_on == "cpu":
        ram /= here
    return room_for(machine, Budgets(ram_bytes=int(ram)))


def why_not(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range, home: WeightHome) -> str:
    """What the smallest policy lacks."""
    worker = _with_shards(worker_job(job, mesh, steps), mesh, home)
    smallest = replace(OffloadPolicy.layerwise(1, source="file"), chunk_tokens=CHUNKS[-1])
    lacks = _room(job, machine, links, mesh, steps, home).lacks(memory_needs(worker, machine, smallest))
    at = f"one worker of {mesh}" if mesh.size > 1 else "one worker"
    return f"{machine.name}, {at}: {lacks}; make the video smaller or shorter, or share it among more"
