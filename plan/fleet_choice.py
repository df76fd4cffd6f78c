"""Chooses a mesh: one for one video now, one for many videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .figure_words import share_text
from .fleet import FleetRun, queue_on
from .fleet_cell import CellCosts, cell_costs, step_seconds
from .fleet_exchange import handover_seconds
from .fleet_layouts import axes, fitting_count, layouts
from .fleet_queue import StageSeconds, run_queue
from .links import Links
from .machine import Machine
from .memory_needs import DoesNotFitError
from .mesh import Mesh, MeshError
from .offload_job import OffloadJob
from .shapes import HEAD_DIM
from .stages import stage_boundaries
from .workers_ref import WeightHome

SAME = 0.005
"""A layout that is faster by less than that share is not worth another axis."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """The proposed mesh with its simulated queue, and what it was chosen from."""

    mesh: Mesh
    run: FleetRun
    alone_s: float | None
    """What one worker takes for the same videos; None where it has too little memory."""
    candidates: tuple[FleetRun, ...]
    """Every layout that was simulated, the fastest first. What cannot be faster by its computing alone is not."""
    misfits: tuple[tuple[Mesh, str], ...]
    """Layouts for which there is too little memory, and why."""
    fewer: FleetRun | None
    """The same videos on fewer of the workers, where that is faster: the others cost more than they bring."""
    reason: str
    """Why this one, in words with numbers; all of them simulated."""

    @property
    def weights(self) -> WeightHome:
        """Where the workers of most cells keep their weights."""
        homes = [stage.weights for stage in self.run.stages]
        return max(homes, key=homes.count)


def propose_mesh(
    workers: int, job: OffloadJob, machine: Machine, links: Links, samples: int = 1, *, heads: int | None = None
) -> MeshPlan:
    """The layout of exactly `workers` workers under which `samples` videos are predicted to be done first.

    `samples=1` is "one video now"; a number, or a large one, is "many videos".

    Args:
        workers: how many there are.
        job: one video on one worker: all tokens, all lanes of one sample.
        machine: as of `simulate_fleet`, as `links`.
        links: between the workers.
        samples: videos that are made.
        heads: attention heads; None: width / 128, as the A14B experts have them.

    Raises MeshError when no layout suits so many workers, DoesNotFitError when there is too little memory for any.
    """
    if workers < 1 or samples < 1:
        raise MeshError(f"{workers} workers for {samples} videos: give 1 or more of both")
    asked = {"heads": max(1, job.expert.width // HEAD_DIM) if heads is None else heads, "samples": samples}
    rings = machine.computes_on == "cuda"
    meshes = layouts(workers, job, **asked, rings=rings)
    if not meshes:
        fitting = fitting_count(workers, job, **asked, rings=rings)
        raise MeshError(
            f"{workers} workers cannot share {samples} video{'s' * (samples != 1)} of {len(job.experts_of_steps)} "
            f"steps, {job.tokens} tokens and {asked['heads']} heads evenly: use {fitting}"
        )
    cells = _Cells(job, machine, links, samples)
    misfits = cells.simulate_best(meshes)
    if not cells.runs:
        raise DoesNotFitError(misfits[0][1])
    ranked = sorted(cells.runs, key=lambda run: run.makespan_s)
    same_s = (1 + SAME) * ranked[0].makespan_s
    chosen = min((run for run in ranked if run.makespan_s <= same_s), key=_simplest)
    alone_s = cells.alone_seconds()
    fewer = _faster_with_fewer(chosen, cells, lambda count: layouts(count, job, **asked, rings=rings))
    return MeshPlan(
        mesh=chosen.mesh,
        run=chosen,
        alone_s=alone_s,
        candidates=(chosen, *(run for run in ranked if run is not chosen)),
        misfits=misfits,
        fewer=fewer,
        reason=_reason(chosen, alone_s, ranked, fewer),
    )


def _simplest(run: FleetRun) -> tuple[int, int, float]:
    """Of layouts that are equally fast: no ring, which not every backend of attention has, and few axes."""
    return run.mesh.ring, axes(run.mesh), run.makespan_s


def _faster_with_fewer(
    chosen: FleetRun, cells: _Cells, layouts_of: Callable[[int], tuple[Mesh, ...]]
) -> FleetRun | None:
    """The best run with fewer workers, though with more than half of them, where one is faster than `chosen`."""
    if chosen.videos >= chosen.mesh.size:
        return None  # Every worker may have videos of its own.
    fewer = _Cells.like(cells)
    for count in range(chosen.mesh.size - 1, chosen.mesh.size // 2, -1):
        meshes = layouts_of(count)
        if meshes and min(fewer.least_seconds(mesh) for mesh in meshes) < (1 - SAME) * chosen.makespan_s:
            fewer.simulate_best(meshes)
    best = min(fewer.runs, key=lambda run: (run.makespan_s, run.mesh.size), default=None)
    return best if best is not None and best.makespan_s < (1 - SAME) * chosen.makespan_s else None


class _Cells:
    """Cells that were simulated, each once, and the queues that are made of them."""

    def __init__(self, job: OffloadJob, machine: Machine, links: Links, samples: int) -> None:
        self._job = job
        self._machine = machine
        self._links = links
        self._samples = samples
        self._costs: dict[tuple[int, int, int, int, range], CellCosts] = {}
        self.runs: list[FleetRun] = []

    def simulate_best(self, meshes: tuple[Mesh, ...]) -> tuple[tuple[Mesh, str], ...]:
        """Simulate what may be the fastest; which layouts do not fit, and why."""
        misfits = []
        for least_s, _, mesh in sorted((self.least_seconds(mesh), number, mesh) for number, mesh in enumerate(meshes)):
            if self.runs and least_s >= (1 + SAME) * min(run.makespan_s for run in self.runs):
                break
            try:
                self.runs.append(self._simulate(mesh))
            except DoesNotFitError as err:
                misfits.append((mesh, str(err)))
        return tuple(misfits)

    @classmethod
    def like(cls, other: _Cells) -> _Cells:
        """For the same run, with nothing simulated yet."""
        return cls(other._job, other._machine, other._links, other._samples)

    def alone_seconds(self) -> float | None:
        """What one worker takes for all videos."""
        alone = _Cells.like(self)
        alone.simulate_best((Mesh(),))
        return alone.runs[0].makespan_s if alone.runs else None

    def _simulate(self, mesh: Mesh) -> FleetRun:
        stages = tuple(self._cell(mesh, part) for part in self._parts(mesh))
        return queue_on(self._job, self._links, mesh, stages, self._samples)

    def _cell(self, mesh: Mesh, part: range) -> CellCosts:
        # Beyond one machine, how many there are changes nothing inside a cell.
        size = min(mesh.size, self._links.workers_per_machine + 1)
        place = (size, mesh.cfg, mesh.ring, mesh.ulysses, part)
        if place not in self._costs:
            self._costs[place] = cell_costs(self._job, self._machine, self._links, mesh, part)
        return self._costs[place]

    def _parts(self, mesh: Mesh) -> tuple[range, ...]:
        seconds = step_seconds(self._job, self._machine, self._links, mesh)
        return stage_boundaries(self._job.experts_of_steps, seconds, mesh.stage)

    def least_seconds(self, mesh: Mesh) -> float:
        """What the queue takes if nobody ever waits for weights."""
        seconds = step_seconds(self._job, self._machine, self._links, mesh)
        sums = [sum(seconds[part.start : part.stop]) for part in self._parts(mesh)]
        stages = [StageSeconds(first_s=least_s, next_s=least_s) for least_s in sums]
        handover_s = handover_seconds(self._job, mesh, self._links)
        return run_queue(stages, cells=mesh.data, videos=self._samples, handover_s=handover_s).makespan_s


def _reason(chosen: FleetRun, alone_s: float | None, ranked: list[FleetRun], fewer: FleetRun | None) -> str:
    """`cfg 2 x ulysses 4: one video in 217.6 s, 6.8 times as fast as one worker; 15 % of it ...`."""
    videos = "one video" if chosen.videos == 1 else f"{chosen.videos} videos"
    parts = [f"{chosen.mesh}: {videos} in {chosen.makespan_s:.1f} s"]
    if alone_s is not None and chosen.mesh.size > 1:
        parts[0] += f", {alone_s / chosen.makespan_s:.1f} times as fast as one worker"
    whole_s = chosen.makespan_s * len(chosen.loads)
    told = sum(load.exchange_s for load in chosen.loads) / whole_s
    waited = sum(load.stall_s for load in chosen.loads) / whole_s
    parts.append(f"workers wait {share_text(told)} of the time for each other, {share_text(waited)} for weights")
    if chosen.busy_share < 1 - SAME:
        parts.append(f"and have nothing to do for {share_text(1 - chosen.busy_share)} of it")
    others = [run for run in ranked if run.mesh != chosen.mesh]
    if others:
        parts.append(f"next is {others[0].mesh} with {others[0].makespan_s:.1f} s")
    if fewer is not None:
        parts.append(f"{fewer.mesh.size} of the workers alone are faster, {fewer.mesh} with {fewer.makespan_s:.1f} s")
    return "; ".join(parts)
