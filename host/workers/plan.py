"""Layout and policy for a run on workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...distributed import (
    Driver,
    check_layout,
    choose_layout,
    describe_layout,
    describe_wire,
    format_machines,
    part_sizes,
    wire_traffic,
    worker_share,
)
from ...plan import AutoOffload, Budgets, Machine, describe_policy, describe_ram, plan_offload
from ...schema import Mesh, OffloadPolicy
from ...schema.refs import LOCAL, WeightPlacement, WorkersRef, check_degrees
from ...shapes import RunShape

logger = logging.getLogger("wanstream.workers")

GPUS_PER_MACHINE = 8
"""Assumed number of cluster workers per machine."""


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A run with one or more videos on workers."""

    workers: WorkersRef
    shape: RunShape
    """The run with all videos on one worker."""
    videos: int
    requested: OffloadPolicy | AutoOffload
    """The requested policy."""


@dataclass(frozen=True, kw_only=True)
class WorkersPlan:
    """Layout and policy for a run.

    `reasons` explain the planner's choices and contain hints on the user's.
    """

    mesh: Mesh
    policy: OffloadPolicy
    reasons: tuple[str, ...] = ()


class WorkersPlanner:
    """Plans runs. A run equal to the last one gets the same plan, so workers keep their buffers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[SharedRun, WorkersPlan] | None = None

    def plan(self, run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
        """Return layout and policy for a run, as `plan_workers`."""
        with self._lock:
            if self._last is None or self._last[0] != run:
                self._last = run, plan_workers(run, machine_of)
            return self._last[1]


def plan_workers(run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
    """Return layout and policy for `run`.

    `machine_of` is called only if the planner has to choose one of them.

    Raises MeshError for a layout that does not suit the run, and DoesNotFitError if memory is too
    small.
    """
    mesh, reasons = _layout(run, machine_of)
    if isinstance(run.requested, OffloadPolicy):
        return WorkersPlan(mesh=mesh, policy=run.requested, reasons=reasons)
    share = worker_share(
        mesh,
        _group_shape(run, mesh),
        machine_of(),
        run.requested.budgets,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    policy = plan_offload(share.run, share.machine, share.budgets).policy
    chosen = (
        f"chosen for each worker: {describe_policy(policy, run.shape.blocks.blocks)}, "
        f"{describe_ram(policy)}"
    )
    logger.info("%s", chosen)
    return WorkersPlan(mesh=mesh, policy=policy, reasons=(*reasons, chosen))


def wire_notes(run: SharedRun, driver: Driver) -> tuple[str, ...]:
    """Return one line for each worker group on several machines, with the cost per step.

    The groups are from the last run.
    """
    layout = replace(driver.mesh, data=1, stage=1)
    shape = _group_shape(run, driver.mesh)
    notes = []
    for ranks, facts in driver.workers:
        if not facts:
            continue
        traffic = wire_traffic(layout, [each.machine for each in facts], shape)
        if traffic is None:
            continue
        cost = describe_wire(traffic, min(each.link_bytes_per_s for each in facts))
        notes.append(
            f"workers that share a video are apart: {format_machines(ranks, facts)}; {cost}"
        )
    return tuple(notes)


def _layout(run: SharedRun, machine_of: Callable[[], Machine]) -> tuple[Mesh, tuple[str, ...]]:
    workers = run.workers
    if workers.mesh is not None:
        check_degrees(workers.mesh, workers.count)
        return workers.mesh, check_layout(workers.mesh, _group_shape(run, workers.mesh), run.videos)
    if workers.count == 1:
        return Mesh(), ()
    together = run.videos
    if workers.goal == "throughput":
        together = 1
    mesh = choose_layout(
        workers.count,
        _shape_of_videos(run, together),
        machine_of(),
        run.requested.budgets if isinstance(run.requested, AutoOffload) else Budgets(),
        samples=run.videos // together,
        workers_per_machine=_workers_per_machine(workers),
        weights=_weights(workers),
    )
    reason = f"laid out as {describe_layout(mesh)}"
    logger.info("%s", reason)
    return mesh, (reason,)


def _group_shape(run: SharedRun, mesh: Mesh) -> RunShape:
    """Return the shape for the largest number of videos in one worker group at once."""
    return _shape_of_videos(run, max(part_sizes(run.videos, mesh)))


def _shape_of_videos(run: SharedRun, count: int) -> RunShape:
    """Return the shape for `count` of the videos."""
    return replace(run.shape, samples=count * run.shape.samples // run.videos)


def _workers_per_machine(workers: WorkersRef) -> int:
    return workers.count if workers.address == LOCAL else min(workers.count, GPUS_PER_MACHINE)


def _weights(workers: WorkersRef) -> WeightPlacement:
    # A measurement decides `auto` when workers start, so the placement with the largest RAM use
    # must fit.
    return "full" if workers.weights == "auto" else workers.weights
