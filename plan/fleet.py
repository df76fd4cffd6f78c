"""What workers on a mesh take for one video, and for a queue of them, by simulation."""

from __future__ import annotations

from dataclasses import dataclass

from .fleet_cell import HOMES, CellCosts, cell_costs, step_seconds
from .fleet_exchange import handover_seconds
from .fleet_queue import QueueRun, StageSeconds, run_queue
from .links import Links
from .machine import Machine
from .mesh import Mesh
from .offload_job import OffloadJob
from .stages import stage_boundaries
from .workers_ref import WeightHome


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """What one worker does in the whole queue."""

    rank: int
    videos: int
    """That it computed a part of."""
    busy_s: float
    compute_s: float
    exchange_s: float
    stall_s: float
    bus_bytes: float
    peer_bytes: float


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """A simulated queue of equal videos on a mesh."""

    mesh: Mesh
    videos: int
    makespan_s: float
    first_video_s: float
    """When the first video is done; all of it where there is one video."""
    stages: tuple[CellCosts, ...]
    loads: tuple[WorkerLoad, ...]
    """Per rank."""

    @property
    def video_s(self) -> float:
        """Seconds per video."""
        return self.makespan_s / self.videos

    @property
    def busy_share(self) -> float:
        """How much of the time a worker computes or waits for its own cell, on average."""
        return sum(load.busy_s for load in self.loads) / (self.makespan_s * len(self.loads))


def simulate_fleet(
    job: OffloadJob,
    machine: Machine,
    links: Links,
    mesh: Mesh,
    *,
    videos: int = 1,
    weights: tuple[WeightHome, ...] = HOMES,
) -> FleetRun:
    """Simulate `videos` runs of `job` on a mesh of like workers, each with the GPU of `machine`.

    Args:
        job: one video on one worker: all tokens, all lanes.
        machine: one machine, with the rates of one of its GPUs; its RAM and its disk are shared by all its workers.
        links: between workers, with how many of them there are on a machine.
        mesh: passes `check_mesh` for this job.
        videos: how many are made.
        weights: where they may be kept; the best of these is taken.

    Raises DoesNotFitError when there is too little memory, MeshError for stages that there cannot be.
    """
    seconds = step_seconds(job, machine, links, mesh)
    parts = stage_boundaries(job.experts_of_steps, seconds, mesh.stage)
    stages = tuple(cell_costs(job, machine, links, mesh, part, weights) for part in parts)
    return queue_on(job, links, mesh, stages, videos)


def queue_on(job: OffloadJob, links: Links, mesh: Mesh, stages: tuple[CellCosts, ...], videos: int) -> FleetRun:
    """`videos` on a mesh whose stages take `stages`."""
    queue = run_queue(
        [StageSeconds(first_s=stage.first_s, next_s=stage.next_s) for stage in stages],
        cells=mesh.data,
        videos=videos,
        handover_s=handover_seconds(job, mesh, links),
    )
    return FleetRun(
        mesh=mesh,
        videos=videos,
        makespan_s=queue.makespan_s,
        first_video_s=queue.done_s[0],
        stages=stages,
        loads=tuple(_load(mesh, stages, queue, rank) for rank in range(mesh.size)),
    )


def _load(mesh: Mesh, stages: tuple[CellCosts, ...], queue: QueueRun, rank: int) -> WorkerLoad:
    at = mesh.coordinates(rank)
    stage, videos = stages[at.stage], queue.videos[at.stage][at.data]
    return WorkerLoad(
        rank=rank,
        videos=videos,
        busy_s=queue.busy_s[at.stage][at.data],
        compute_s=videos * stage.compute_s,
        exchange_s=videos * stage.exchange_s,
        stall_s=videos * stage.stall_s + (stage.first_s - stage.next_s if videos else 0.0),
        bus_bytes=videos * stage.bus_bytes,
        peer_bytes=videos * stage.peer_bytes,
    )
