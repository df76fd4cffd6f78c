"""Plan of a run on workers: its layout and the policy of each worker, computed once for equal runs."""

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

GPUS_PER_MACHINE = 8
"""Assumed number of a cluster's workers on one machine."""

logger = logging.getLogger("wanstream.planner")


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A run of one or more videos on workers."""

    workers: WorkersRef
    job: OffloadJob
    """The run of all videos on one worker."""
    videos: int
    asked: OffloadPolicy | AutoOffload
    """The requested policy."""


@dataclass(frozen=True, kw_only=True)
class WorkersPlan:
    """Layout and policy of a run. `reasons` explain the planner's choices and contain hints on the user's."""

    mesh: Mesh
    policy: OffloadPolicy
    reasons: tuple[str, ...] = ()


def plan_workers(run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
    """Return layout and policy of `run`; `machine_of` is called only if the planner has to choose one of them.

    Raises MeshError for a layout that does not suit the run, and DoesNotFitError if memory is too small.
    """
    mesh, reasons = _layout(run, machine_of)
    if isinstance(run.asked, OffloadPolicy):
        return WorkersPlan(mesh=mesh, policy=run.asked, reasons=reasons)
    share = worker_share(
        mesh,
        _group_job(run, mesh),
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
        job = _group_job(run, mesh)
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
        _layout_job(run),
        machine_of(),
        run.asked.budgets if isinstance(run.asked, AutoOffload) else Budgets(),
        samples=run.videos if run.workers.goal == "throughput" else 1,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    reason = f"laid out as {describe_layout(mesh)}"
    logger.info("%s", reason)
    return mesh, (reason,)


def _layout_job(run: SharedRun) -> OffloadJob:
    """Return the job to choose a layout for: one video if the goal is throughput, else all videos."""
    if run.workers.mesh is None and run.workers.goal == "throughput":
        return _job_of_videos(run, 1)
    return run.job


def _group_job(run: SharedRun, mesh: Mesh) -> OffloadJob:
    """Return the job of the largest number of videos that one worker group of `mesh` computes at once."""
    from ..distributed import part_sizes

    return _job_of_videos(run, max(part_sizes(run.videos, mesh)))


def _job_of_videos(run: SharedRun, count: int) -> OffloadJob:
    """Return the job of `count` of the videos."""
    return replace(run.job, lanes={expert: count * lanes // run.videos for expert, lanes in run.job.lanes.items()})


def _workers_per_machine(workers: WorkersRef) -> int:
    return workers.count if workers.address == LOCAL else min(workers.count, GPUS_PER_MACHINE)


def _weights(workers: WorkersRef) -> WeightPlacement:
    # `auto` is decided by a measurement when workers start, so the placement with the largest RAM use must fit.
    return "full" if workers.weights == "auto" else workers.weights


class WorkersPlanCache:
    """Cache of the last plan: equal runs get equal plans, so that workers keep their buffers between runs."""

    def __init__(self) -> None:
        self._last: tuple[SharedRun, WorkersPlan] | None = None

    def plan(self, run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
        """Return the plan of `run`, computed by `plan_workers` if it differs from the last run."""
        if self._last is None or self._last[0] != run:
            self._last = (run, plan_workers(run, machine_of))
        return self._last[1]
