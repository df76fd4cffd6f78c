"""Workers of a host: started once per reference, and the layout and policy of equal runs.

Ray clusters are listed in a settings file of the user, which no graph can change.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import platformdirs
import torch

from ..devices import runtime_for
from ..distributed import (
    Driver,
    InProcessPool,
    Pool,
    RayMissingError,
    RayPool,
    WorkerLostError,
    check_token_file,
    format_machines,
)
from ..plan import (
    AutoOffload,
    Budgets,
    Machine,
    OffloadJob,
    check_layout,
    choose_layout,
    describe_layout,
    describe_policy,
    describe_ram,
    describe_wire,
    part_sizes,
    plan_offload,
    wire_traffic,
    worker_share,
)
from ..schema import (
    BUILTIN_CLUSTERS,
    GOALS,
    IN_PROCESS,
    LOCAL,
    Cluster,
    Mesh,
    OffloadPolicy,
    WeightPlacement,
    WorkersError,
    WorkersRef,
    check_degrees,
    cluster_named,
    read_clusters,
)

VARIABLE = "WANSTREAM_CLUSTERS"
"""Environment variable with the path of another file."""


def clusters_file() -> Path:
    """Return the path of the list of clusters."""
    # Not in ComfyUI's user folder: web clients may write files there.
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_config_dir("wanstream", appauthor=False), "clusters.json")


def cluster_names() -> list[str]:
    """Return all cluster names; only those of this machine, with a warning, if the list cannot be read."""
    try:
        return list(_clusters())
    except WorkersError as err:
        logger.warning("%s", err)
        return list(BUILTIN_CLUSTERS)


def cluster(name: object, *, in_process: bool = True) -> Cluster:
    """Return the entry called `name`. Raises WorkersError with the valid names, or if the list cannot be read.

    `in_process`: this process is one of them.
    """
    found = BUILTIN_CLUSTERS.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    valid = {key: entry for key, entry in _clusters().items() if in_process or entry.address != IN_PROCESS}
    return cluster_named(name, valid, str(clusters_file()))


def _clusters() -> dict[str, Cluster]:
    """Return all entries with absolute token file paths, resolved against the folder of the list; `~` is expanded."""
    file = clusters_file()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return dict(BUILTIN_CLUSTERS)
    except (OSError, ValueError) as err:
        raise WorkersError(f"the list of clusters {file} cannot be read: {err}") from err
    folder = file.absolute().parent
    return {name: _with_whole_paths(entry, folder) for name, entry in read_clusters(text, str(file)).items()}


def _with_whole_paths(entry: Cluster, folder: Path) -> Cluster:
    # os.path, unlike pathlib, does not raise for the `~` of an unknown user: the missing file is refused with its path.
    return replace(entry, token_file=str(folder / os.path.expanduser(entry.token_file))) if entry.token_file else entry


StartPool: TypeAlias = Callable[[WorkersRef, torch.device], Pool]

RELEASE_TIMEOUT_S = 60.0
"""Seconds that workers may take to release memory; after that they are killed, which releases it too."""

logger = logging.getLogger("wanstream.workers")


def check_ray(ref: WorkersRef) -> None:
    """Raise RayMissingError if `ref` needs Ray and it is not installed, RaySetupError for an unusable token file.

    Does not import Ray.
    """
    if ref.address != IN_PROCESS and find_spec("ray") is None:
        raise RayMissingError
    if ref.token_file:
        check_token_file(ref.token_file)


def gpus_of(device: torch.device) -> int | None:
    """Return the number of GPUs for workers of this machine; None if `device` is a CPU."""
    runtime = runtime_for(device)
    return None if runtime is None else runtime.count()


def start_pool(ref: WorkersRef, device: torch.device) -> Pool:
    """Start the workers named by `ref` on devices of the type of `device`; blocks until all of them are ready."""
    if ref.address == IN_PROCESS:
        return InProcessPool(str(device))
    return RayPool(ref, device.type)


@dataclass(kw_only=True)
class _StartedWorkers:
    ref: WorkersRef
    device: torch.device
    pool: Pool
    driver: Driver | None = None


class WorkerRegistry:
    """Registry of at most one set of workers, by value. Thread-safe. The workers end with this process.

    Args:
        start: starts the workers named by a reference.
        release_timeout_s: seconds that a worker may take to release memory.
    """

    def __init__(self, start: StartPool = start_pool, *, release_timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        self._start, self._release_timeout_s = start, release_timeout_s
        self._lock = threading.Lock()
        self._entry: _StartedWorkers | None = None
        self._last_plan: tuple[SharedRun, WorkersPlan] | None = None

    def plan(self, run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
        """Return layout and policy of a run as `plan_workers`.

        A run that equals the last one gets its plan, so that workers keep their buffers between runs.
        """
        with self._lock:
            if self._last_plan is None or self._last_plan[0] != run:
                self._last_plan = run, plan_workers(run, machine_of)
            return self._last_plan[1]

    def get(self, ref: WorkersRef, mesh: Mesh, device: torch.device) -> Driver:
        """Return the workers named by `ref` with layout `mesh`, and start them if necessary.

        References that differ only in layout, goal and `max_restarts` share processes. Other workers are ended first,
        so that no two sets share a device.

        Raises RayMissingError, and the errors of starting workers.
        """
        with self._lock:
            # The layout decides which workers are on one machine. Another one later does not move them, because that
            # would start them again; the sampler's text reports groups that are apart.
            entry = self._running(replace(ref, mesh=mesh), device)
            if entry.driver is None or (entry.driver.ref, entry.driver.mesh) != (ref, mesh):
                entry.driver = Driver(entry.pool, ref, mesh, follows=entry.driver)
            return entry.driver

    def pool(self, ref: WorkersRef, device: torch.device) -> Pool:
        """Return the workers named by `ref` without a layout; otherwise as `get`."""
        with self._lock:
            return self._running(ref, device).pool

    def release_memory(self) -> bool:
        """Release the workers' weights; the processes stay alive and open their experts again in the next run.

        A worker that does not respond in time is killed, and replaced in the next run. Returns False, without a
        change, while a run is in progress.
        """
        with self._lock:
            entry = self._entry
            if entry is None:
                return True
            if entry.driver is not None and entry.driver.is_running:
                return False
            requests = {worker.call("close"): worker for worker in entry.pool.workers}
            done, late = wait(requests, timeout=self._release_timeout_s)
            for request in late:
                rank = requests[request].rank
                logger.warning(
                    "worker %d has not released its memory in %g s: killing it", rank, self._release_timeout_s
                )
                requests[request].kill()
            for request in done:
                with suppress(WorkerLostError):  # a dead worker has no memory to release
                    request.result()
            return True

    def close(self) -> None:
        """End the workers, if any."""
        with self._lock:
            self._close()

    def _running(self, ref: WorkersRef, device: torch.device) -> _StartedWorkers:
        check_ray(ref)
        key = _process_key(ref)
        entry = self._entry
        if entry is not None and (entry.ref, entry.device) == (key, device) and entry.pool.usable:
            return entry
        self._close()
        self._entry = entry = _StartedWorkers(ref=key, device=device, pool=self._start(ref, device))
        atexit.register(self.close)
        return entry

    def _close(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            atexit.unregister(self.close)
            entry.pool.close()


def _process_key(ref: WorkersRef) -> WorkersRef:
    """Return `ref` without the settings that only affect a run, not the processes."""
    return replace(ref, mesh=None, goal=GOALS[0], max_restarts=0)


GPUS_PER_MACHINE = 8
"""Assumed number of a cluster's workers on one machine."""


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A run of one or more videos on workers."""

    workers: WorkersRef
    job: OffloadJob
    """The run of all videos on one worker."""
    videos: int
    requested: OffloadPolicy | AutoOffload
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
    if isinstance(run.requested, OffloadPolicy):
        return WorkersPlan(mesh=mesh, policy=run.requested, reasons=reasons)
    share = worker_share(
        mesh,
        _group_job(run, mesh),
        machine_of(),
        run.requested.budgets,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    policy = plan_offload(share.job, share.machine, share.budgets).policy
    chosen = f"chosen for each worker: {describe_policy(policy, run.job.expert.blocks)}, {describe_ram(policy)}"
    logger.info("%s", chosen)
    return WorkersPlan(mesh=mesh, policy=policy, reasons=(*reasons, chosen))


def wire_notes(run: SharedRun, driver: Driver) -> tuple[str, ...]:
    """Return a line for each worker group of the last run that is on several machines: its cost per step."""
    layout, job, notes = replace(driver.mesh, data=1, stage=1), _group_job(run, driver.mesh), []
    for ranks, facts in driver.workers:
        if not facts or (traffic := wire_traffic(layout, [each.machine for each in facts], job)) is None:
            continue
        cost = describe_wire(traffic, min(each.link_bytes_per_s for each in facts))
        notes.append(f"workers that share a video are apart: {format_machines(ranks, facts)}; {cost}")
    return tuple(notes)


def _layout(run: SharedRun, machine_of: Callable[[], Machine]) -> tuple[Mesh, tuple[str, ...]]:
    count, mesh = run.workers.count, run.workers.mesh
    if mesh is not None:
        check_degrees(mesh, count)
        return mesh, check_layout(mesh, _group_job(run, mesh), run.videos)
    if count == 1:
        return Mesh(), ()
    throughput = run.workers.goal == "throughput"
    mesh = choose_layout(
        count,
        _job_of_videos(run, 1) if throughput else run.job,
        machine_of(),
        run.requested.budgets if isinstance(run.requested, AutoOffload) else Budgets(),
        samples=run.videos if throughput else 1,
        workers_per_machine=_workers_per_machine(run.workers),
        weights=_weights(run.workers),
    )
    reason = f"laid out as {describe_layout(mesh)}"
    logger.info("%s", reason)
    return mesh, (reason,)


def _group_job(run: SharedRun, mesh: Mesh) -> OffloadJob:
    """Return the job of the largest number of videos that one worker group of `mesh` computes at once."""
    return _job_of_videos(run, max(part_sizes(run.videos, mesh)))


def _job_of_videos(run: SharedRun, count: int) -> OffloadJob:
    """Return the job of `count` of the videos."""
    return replace(run.job, lanes={expert: count * lanes // run.videos for expert, lanes in run.job.lanes.items()})


def _workers_per_machine(workers: WorkersRef) -> int:
    return workers.count if workers.address == LOCAL else min(workers.count, GPUS_PER_MACHINE)


def _weights(workers: WorkersRef) -> WeightPlacement:
    # `auto` is decided by a measurement when workers start, so the placement with the largest RAM use must fit.
    return "full" if workers.weights == "auto" else workers.weights
