"""How workers share a run: the layout and the policy that all of them take, chosen once for equal runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..plan import (
    AutoOffload,
    Budgets,
    Machine,
    OffloadJob,
    choose_layout,
    describe_layout,
    describe_policy,
    describe_ram,
    heads_of,
    plan_offload,
    worker_share,
)
from ..schema import LOCAL, Mesh, OffloadPolicy, WeightPlacement, WorkersRef, check_mesh

GPUS_OF_A_MACHINE = 8
"""Workers of a cluster that are taken to share a machine."""

logger = logging.getLogger("wanstream.planner")


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """What is to be shared."""

    workers: WorkersRef
    job: OffloadJob
    """All videos on one worker."""
    videos: int
    asked: OffloadPolicy | AutoOffload


@dataclass(frozen=True, kw_only=True)
class WorkersPlan:
    """How a run is shared. `reasons` tell what was chosen, and what is worth saying of what a user chose."""

    mesh: Mesh
    policy: OffloadPolicy
    reasons: tuple[str, ...] = ()


def plan_workers(run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
    """Layout and policy of `run`; `machine_of` is asked only where something is left to the planner.

    Raises MeshError for a layout that does not suit the run, and DoesNotFitError where there is too little memory.
    """
    mesh, reasons = _layout(run, machine_of)
    if isinstance(run.asked, OffloadPolicy):
        return WorkersPlan(mesh=mesh, policy=run.asked, reasons=reasons)
    share = worker_share(
        mesh,
        _of_cell(run, mesh),
        machine_of(),
        run.asked.budgets,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    policy = plan_offload(share.job, share.machine, share.budgets).policy
    chosen = f"chosen for each worker: {describe_policy(policy, run.job.expert.blocks)}, {describe_ram(policy)}"
    logger.info("%s", chosen)
    return WorkersPlan(mesh=mesh, policy=policy, reasons=(*reasons, chosen))


def _layout(run: SharedRun, machine_of: Callable[[], Machine]) -> tuple[Mesh, tuple[str, ...]]:
    count, mesh = run.workers.count, run.workers.mesh
    if mesh is not None:
        job = _of_cell(run, mesh)
        return mesh, check_mesh(
            mesh,
            workers=count,
            heads=heads_of(job),
            tokens=job.tokens,
            lanes={expert: job.lanes[expert] for expert in job.experts_of_steps},
            steps=len(job.experts_of_steps),
            samples=run.videos,
        )
    if count == 1:
        return Mesh(), ()
    mesh = choose_layout(
        count,
        _one_video(run),
        machine_of(),
        run.asked.budgets if isinstance(run.asked, AutoOffload) else Budgets(),
        samples=run.videos if run.workers.goal == "throughput" else 1,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    reason = f"laid out as {describe_layout(mesh)}"
    logger.info("%s", reason)
    return mesh, (reason,)


def _one_video(run: SharedRun) -> OffloadJob:
    """The job of one of the videos where they go separate ways, else of all together."""
    if run.workers.mesh is None and run.workers.goal == "throughput":
        return _of_videos(run, 1)
    return run.job


def _of_cell(run: SharedRun, mesh: Mesh) -> OffloadJob:
    """The job of the videos that a group of `mesh` computes at once."""
    from ..distributed import part_sizes

    return _of_videos(run, max(part_sizes(run.videos, mesh)))


def _of_videos(run: SharedRun, count: int) -> OffloadJob:
    """The job of so many of the videos."""
    return replace(run.job, lanes={expert: count * lanes // run.videos for expert, lanes in run.job.lanes.items()})


def _workers_per_machine(workers: WorkersRef) -> int:
    return workers.count if workers.address == LOCAL else min(workers.count, GPUS_OF_A_MACHINE)


def _weights(workers: WorkersRef) -> WeightPlacement:
    # `auto` is measured when workers start; until then the place that takes most RAM must fit.
    return "full" if workers.weights == "auto" else workers.weights


class WorkersPlanCache:
    """Gives equal runs the same plan, so that workers find their buffers as the run before left them."""

    def __init__(self) -> None:
        self._last: tuple[SharedRun, WorkersPlan] | None = None

    def plan(self, run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
        """As `plan_workers`, which is asked for another run only."""
        if self._last is None or self._last[0] != run:
            self._last = (run, plan_workers(run, machine_of))
        return self._last[1]
