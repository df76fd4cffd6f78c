"""What a cell of a mesh takes for its part of a video: the planner's own simulation of one of its workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .fleet_exchange import gather_exchange, lane_exchange, step_exchange
from .fleet_ways import Way, ways_of, why_not, worker_job, worker_machine
from .links import Links
from .machine import Machine
from .memory_needs import DoesNotFitError, staging_slots
from .mesh import Mesh
from .offload_job import OffloadJob
from .predict import predict, visit_seconds
from .program import compile_program
from .ram import RunPrograms, compile_ram, plan_ram
from .residency import OffloadPolicy, plan_residency
from .timeline import StepRecord, Timeline
from .visits import step_visits
from .workers_ref import ON_DEVICE, SHARDED, WHOLE_WEIGHTS, WeightHome

HOMES: tuple[WeightHome, ...] = (WHOLE_WEIGHTS, SHARDED, ON_DEVICE)
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
class _Simulated:
    way: Way
    timeline: Timeline

    @property
    def total_s(self) -> float:
        return round(self.timeline.wall_s, 3)


def cell_costs(
    job: OffloadJob,
    machine: Machine,
    links: Links,
    mesh: Mesh,
    steps: range,
    homes: tuple[WeightHome, ...] = HOMES,
) -> CellCosts:
    """What a cell of `mesh` takes for `steps`, with its weights kept as is best: simulated for two videos in a row.

    Raises DoesNotFitError when there is too little memory for any way.
    """
    best: _Simulated | None = None
    for home in homes:
        ways = sorted(ways_of(job, machine, links, mesh, steps, home), key=lambda way: (way.least_s, way.device_bytes))
        if not ways or (best is not None and best.total_s <= WORTH_IT * ways[0].least_s):
            continue
        found = _fastest(ways)
        if best is None or WORTH_IT * found.total_s < best.total_s:
            best = found
    if best is None:
        raise DoesNotFitError(why_not(job, machine, links, mesh, steps, homes[0]))
    return _costs(job, links, mesh, steps, best)


def _fastest(ways: list[Way]) -> _Simulated:
    """Simulate those that can be the fastest, in the order of what they could take at best."""
    best: _Simulated | None = None
    for way in ways:
        if best is not None and way.least_s >= best.total_s:
            break
        found = _Simulated(way=way, timeline=_timeline(way))
        if best is None or found.total_s < best.total_s:
            best = found
    assert best is not None, "there is a way"
    return best


def _timeline(way: Way) -> Timeline:
    job, policy = way.job, replace(way.policy, chunk_tokens=None)
    residency, _ = plan_residency(policy, job.block_counts)
    staging = staging_slots(job, way.machine, plan_ram(policy, residency, job.block_counts))
    programs = _programs(job.experts_of_steps, tuple(job.block_counts.items()), policy, staging)
    return predict(job, way.machine, way.policy, programs=programs).timeline


@lru_cache(maxsize=8)
def _programs(
    experts_of_steps: tuple[str, ...], counts: tuple[tuple[str, int], ...], policy: OffloadPolicy, staging: int
) -> RunPrograms:
    """As of `compile_programs`. Cells of many meshes run the same programs, only faster or slower."""
    residency, buffers = plan_residency(policy, dict(counts))
    program = compile_program(step_visits(experts_of_steps, dict(counts)), residency, buffers)
    homes = plan_ram(policy, residency, dict(counts))
    return RunPrograms(device=program, ram=compile_ram(program, homes, staging=staging))


def _costs(job: OffloadJob, links: Links, mesh: Mesh, steps: range, simulated: _Simulated) -> CellCosts:
    way, done = simulated.way, simulated.timeline.steps
    first, following = done[: len(steps)], done[len(steps) :]
    outside = step_exchange(job, mesh, links)
    exchange = lane_exchange(job, mesh, links)
    visits = sum(way.job.lanes[step.expert] for step in following) * job.expert.blocks
    fetched = sum(step.bytes_moved for step in following)
    spread = way.weights != WHOLE_WEIGHTS
    own = 0 if way.weights == ON_DEVICE else fetched
    return CellCosts(
        steps=steps,
        weights=way.weights,
        policy=way.policy,
        first_s=_wall(first) + len(steps) * outside.seconds,
        next_s=_wall(following) + len(steps) * outside.seconds,
        compute_s=sum(step.compute_s for step in following) - visits * exchange.seconds,
        exchange_s=visits * exchange.seconds + len(steps) * outside.seconds,
        stall_s=sum(step.stall_s for step in following),
        bus_bytes=own / mesh.cell_size if spread else own,
        peer_bytes=visits * exchange.nbytes
        + len(steps) * outside.nbytes
        + (gather_exchange(mesh, links, fetched).nbytes if spread else 0.0),
        device_bytes=way.device_bytes,
    )


def step_seconds(job: OffloadJob, machine: Machine, links: Links, mesh: Mesh) -> tuple[float, ...]:
    """What a cell takes for each step of the run while no weights are waited for."""
    whole = range(len(job.experts_of_steps))
    worker = worker_job(job, mesh, whole)
    rated = worker_machine(job, machine, links, mesh)
    outside_s = step_exchange(job, mesh, links).seconds
    seconds = {expert: visit_seconds(worker, rated, expert, None) for expert in worker.lanes}
    return tuple(job.expert.blocks * seconds[expert] + outside_s for expert in job.experts_of_steps)


def _wall(steps: tuple[StepRecord, ...]) -> float:
    return sum(step.wall_s for step in steps)
