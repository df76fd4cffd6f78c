"""What a cell of a mesh takes for its part of a video: the planner's own simulation of one of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .candidates import CHUNKS, device_choices, is_usual, least_seconds
from .fleet_exchange import gather_exchange, lane_exchange, step_exchange
from .links import Links
from .machine import Machine
from .memory_needs import RAM_SHARE, DoesNotFitError, Room, memory_needs, room_for
from .mesh import Mesh
from .offload_job import Budgets, OffloadJob
from .predict import predict, visit_seconds
from .residency import OffloadPolicy
from .timeline import StepRecord
from .workers_ref import WeightHome

HOMES: tuple[WeightHome, ...] = ("full", "sharded", "sharded in VRAM")
WORTH_IT = 1.01
"""Weights are spread over a cell only where that saves more than a hundredth."""


@dataclass(frozen=True, kw_only=True)
class CellCosts:
    """What every worker of a cell takes for the steps of its stage. All of them take the same, side by side."""

    steps: range
    weights: WeightHome
    policy: OffloadPolicy
    first_s: float
    """For its first video: weights come from their files, buffers are empty."""
    next_s: float
    """For each one after that, as all that follows."""
    compute_s: float
    exchange_s: float
    """Waiting for others of the cell: tokens, keys and values, velocities."""
    stall_s: float
    """Waiting for weights."""
    bus_bytes: float
    """Of weights, over the bus of one worker."""
    peer_bytes: float
    """What one worker receives from others, gathered weights among it."""
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class CellWay:
    """One way to give a worker its weights, as a job and a machine that the planner knows."""

    weights: WeightHome
    policy: OffloadPolicy
    job: OffloadJob
    machine: Machine
    device_bytes: int
    least_s: float


def cell_way(
    job: OffloadJob,
    machine: Machine,
    links: Links,
    mesh: Mesh,
    steps: range,
    homes: tuple[WeightHome, ...] = HOMES,
) -> CellWay:
    """The way in which a worker of `mesh` is predicted to end `steps` of two videos first.

    Raises DoesNotFitError when there is too little memory for any.
    """
    ways = [way for home in homes for way in _ways(job, machine, links, mesh, steps, home)]
    if not ways:
        raise DoesNotFitError(_why_not(job, machine, links, mesh, steps))
    enough_s = WORTH_IT * min(way.least_s for way in ways)
    simplest = min((way for way in ways if way.least_s <= enough_s), key=lambda way: HOMES.index(way.weights)).weights
    return min(
        (way for way in ways if way.weights == simplest), key=lambda way: (round(way.least_s, 3), way.device_bytes)
    )


def cell_costs(job: OffloadJob, links: Links, mesh: Mesh, steps: range, way: CellWay) -> CellCosts:
    """The simulated run of `way`: two videos, one after the other."""
    timeline = predict(way.job, way.machine, way.policy).timeline
    outside = step_exchange(job, mesh, links)
    first, following = timeline.steps[: len(steps)], timeline.steps[len(steps) :]
    exchange = lane_exchange(job, mesh, links)
    visits = sum(way.job.lanes[step.expert] for step in following) * job.expert.blocks
    fetched = sum(step.bytes_moved for step in following)
    gathered = gather_exchange(mesh, links, fetched) if way.weights != "full" else None
    from_ram = 0.0 if way.weights == "sharded in VRAM" else fetched / (mesh.cell_size if gathered else 1)
    return CellCosts(
        steps=steps,
        weights=way.weights,
        policy=way.policy,
        first_s=_wall(first) + len(steps) * outside.seconds,
        next_s=_wall(following) + len(steps) * outside.seconds,
        compute_s=sum(step.compute_s for step in following) - visits * exchange.seconds,
        exchange_s=visits * exchange.seconds + len(steps) * outside.seconds,
        stall_s=sum(step.stall_s for step in following),
        bus_bytes=from_ram,
        peer_bytes=visits * exchange.nbytes + len(steps) * outside.nbytes + (gathered.nbytes if gathered else 0.0),
        device_bytes=way.device_bytes,
    )


def step_seconds(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh) -> tuple[float, ...]:
    """What a cell takes for each step of the run while no weights are waited for."""
    whole = range(len(job.experts_of_steps))
    worker = _worker_job(job, mesh, whole)
    rated = _worker_machine(job, machine, links, mesh)
    outside_s = step_exchange(job, mesh, links).seconds
    seconds = {expert: visit_seconds(worker, rated, expert, None) for expert in worker.lanes}
    return tuple(job.expert.blocks * seconds[expert] + outside_s for expert in job.experts_of_steps)


def _wall(steps: tuple[StepRecord, ...]) -> float:
    return sum(step.wall_s for step in steps)


def _ways(
    job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range, home: WeightHome
) -> Iterator[CellWay]:
    """Usual policies that fit, with weights out of RAM or from files."""
    if home != "full" and (mesh.cell_size == 1 or machine.computes_on == "cpu"):
        return
    worker = _worker_job(job, mesh, steps)
    if home == "sharded in VRAM":
        blocks = sum(worker.block_counts.values())
        worker = replace(worker, staying_bytes=worker.staying_bytes + blocks * worker.stored_bytes // mesh.cell_size)
    # Both videos in one program, as the engine keeps its buffers between items of a queue.
    worker = replace(worker, experts_of_steps=worker.experts_of_steps * 2)
    rated = _with_weights(_worker_machine(job, machine, links, mesh), job, links, mesh, home)
    room = _room(job, machine, links, mesh, steps, home)
    for from_file in (False, True):
        if from_file and home == "sharded in VRAM":
            continue
        reads = _reading(rated, links, mesh, home) if from_file else rated
        for policy, device_bytes in _fitting(worker, reads, room, from_file=from_file):
            least_s = least_seconds(worker, reads, policy)
            yield CellWay(
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


def _worker_job(job: OffloadJob, mesh: Mesh, steps: range) -> OffloadJob:
    """What one worker of a cell has to do of `steps`: some of the lanes, and some tokens of each."""
    context = mesh.ring * mesh.ulysses
    experts = job.experts_of_steps[steps.start : steps.stop]
    lanes = {expert: -(-count // mesh.cfg) for expert, count in job.lanes.items() if expert in experts}
    gathered = 2 * (mesh.ring - 1) * (job.tokens // context) * job.expert.width * job.value_bytes
    return replace(
        job,
        tokens=job.tokens // context,
        lanes=lanes,
        experts_of_steps=experts,
        staying_bytes=job.staying_bytes * len(lanes) // len(job.lanes) + gathered,
    )


def _worker_machine(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh) -> Machine:
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
    if home == "full" or machine.h2d_bytes_per_s is None:
        return machine
    gather_s = gather_exchange(mesh, links, job.stored_bytes).seconds
    own_s = job.stored_bytes / mesh.cell_size / machine.h2d_bytes_per_s if home == "sharded" else 0.0
    block_s = own_s + gather_s if links.shares_bus else max(own_s, gather_s)
    return replace(machine, h2d_bytes_per_s=job.stored_bytes / block_s)


def _reading(machine: Machine, links: Links, mesh: Mesh, home: WeightHome) -> Machine:
    """`machine` with what one worker has of the disk, where workers read past the page cache."""
    here = _workers_here(links, mesh)
    # Who reads a share only reads that many bytes less.
    readers = here if home == "full" else max(1, here // mesh.cell_size)
    return replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s / readers)


def _workers_here(links: Links, mesh: Mesh) -> int:
    return min(mesh.size, links.workers_per_machine)


def _room(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range, home: WeightHome) -> Room:
    """Of one worker. A machine keeps one copy of each expert, however many of its workers need it."""
    here = _workers_here(links, mesh)
    if home == "sharded in VRAM":
        return replace(room_for(machine, Budgets()), host=float("inf"))
    experts = set(job.experts_of_steps[steps.start : steps.stop])
    ram = RAM_SHARE * machine.ram_bytes * len(experts) / len(set(job.experts_of_steps))
    if machine.computes_on == "cpu":
        ram /= here
    return room_for(machine, Budgets(ram_bytes=int(ram)))


def _why_not(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh, steps: range) -> str:
    """What the smallest policy lacks."""
    worker = _worker_job(job, mesh, steps)
    smallest = replace(OffloadPolicy.layerwise(1, source="file"), chunk_tokens=CHUNKS[-1])
    lacks = _room(job, machine, links, mesh, steps, "full").lacks(memory_needs(worker, machine, smallest))
    return f"{machine.name}, one worker of {mesh}: {lacks}; make the video smaller or shorter, or share it among more"
