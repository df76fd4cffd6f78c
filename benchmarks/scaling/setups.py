"""The machines and the runs of the page, and their simulated queues, each cell simulated once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from wanstream.plan import T2V_A14B, ExpertShape, FleetRun, Links, Machine, Mesh, OffloadJob, VideoShape, simulate_fleet
from wanstream.plan.fleet import queue_on
from wanstream.plan.fleet_cell import CellCosts
from wanstream.plan.gpus import expected_machine
from wanstream.plan.links import LINKS

GIB = 2**30
COUNTS = (1, 2, 4, 8, 16, 32, 64)
MANY = 1000
RAM_GIB, DISK_GB_S = 512, 7.0
SIZE, STEPS, SWITCH = "1280x720x81", 40, 26


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Machines of eight like GPUs."""

    gpu: str
    link: str

    @property
    def name(self) -> str:
        return f"{self.gpu}, {self.links.name}"

    @property
    def links(self) -> Links:
        return LINKS[self.link]

    @property
    def machine(self) -> Machine:
        return expected_machine(self.gpu, ram_bytes=RAM_GIB * GIB, disk_bytes_per_s=DISK_GB_S * 1e9)


SETUPS = (Setup(gpu="RTX 4090", link="pcie4"), Setup(gpu="H100", link="nvlink"))


def job_of(
    size: str = SIZE, steps: int = STEPS, switch: int = SWITCH, *, lanes: int = 2, expert: ExpertShape = T2V_A14B
) -> OffloadJob:
    """One video in bf16; `switch` steps are of the high-noise expert."""
    width, height, frames = map(int, size.split("x"))
    block = expert.streamed_bytes()
    experts = ("high",) * switch + ("low",) * (steps - switch)
    names = dict.fromkeys(experts)
    return OffloadJob(
        expert=expert,
        tokens=VideoShape(width=width, height=height, frames=frames).tokens,
        lanes=dict.fromkeys(names, lanes),
        experts_of_steps=experts,
        stored_bytes=block,
        file_bytes=block,
        computed_bytes=block,
        staying_bytes=len(names) * expert.staying_bytes(),
    )


def one_video(setup: Setup, mesh: Mesh) -> FleetRun:
    """The video of the page on a mesh."""
    return queue_on(job_of(), setup.links, mesh, _stages(setup, _alike(setup, mesh)), 1)


def many_videos(setup: Setup, mesh: Mesh) -> FleetRun:
    """A thousand of them."""
    return queue_on(job_of(), setup.links, mesh, _stages(setup, _alike(setup, mesh)), MANY)


def _alike(setup: Setup, mesh: Mesh) -> Mesh:
    """The smallest mesh with the same cells: beyond one machine, how many there are changes nothing inside them."""
    enough = -(-(setup.links.workers_per_machine + 1) * mesh.data // mesh.size)
    return replace(mesh, data=min(mesh.data, enough))


@cache
def _stages(setup: Setup, mesh: Mesh) -> tuple[CellCosts, ...]:
    return simulate_fleet(job_of(), setup.machine, setup.links, mesh).stages
