"""Services on every GPU in a Ray: independent processes, placed, ended and restarted by Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...schema.refs import WorkersError, WorkersRef
from ..messages import WorkerFacts, package_versions
from ..path_map import check_paths
from ..transport.pool import WorkerLostError
from .actor import Service
from .connection import CONNECTION
from .environment import LostAtStartError
from .pool import RayPool, RayWorkerHandle, check_versions

FACTS_TIMEOUT_S = 60.0

CheckMachine = Callable[[RayWorkerHandle], None]
"""Check the machine of a process after a restart by Ray, maybe on another one. Raises as
`open_services`, or WorkerLostError or TimeoutError."""


@contextmanager
def open_services(
    ref: WorkersRef, service: Service, *, device: str, count: int | None, paths: Sequence[Path]
) -> Iterator[tuple[Sequence[RayWorkerHandle], CheckMachine]]:
    """Start `service` in `count` processes on the Ray in `ref`, and end them after the `with`.

    `ref.count` is not used.

    Args:
        ref: the Ray, and settings for the processes.
        service: the object in each process.
        device: "cuda" for one GPU each, or "cpu".
        count: number of processes; None: one on each GPU.
        paths: files and folders on this machine. Every machine must have them under the mapped
            paths.

    Raises:
        WorkersError: the device is "cuda", and the Ray has no GPU.
        MissingPathError, DifferentFilesError: a machine has no such path, or another file.
        ValueError, OSError: as `RayPool`.
    """

    def facts_of(worker: RayWorkerHandle) -> WorkerFacts:
        answer = worker.call("facts", [str(path) for path in paths], ref.paths)
        facts: WorkerFacts = answer.result(FACTS_TIMEOUT_S)
        return facts

    def check_machine(worker: RayWorkerHandle) -> None:
        # The facts of the other processes are still those from the start.
        facts = [*first[: worker.rank], facts_of(worker), *first[worker.rank + 1 :]]
        check_versions(package_versions(), facts)
        check_paths(facts, ref.paths)

    # Before the pool, because the number of processes depends on the cluster.
    ray = CONNECTION.acquire(ref)
    try:
        number = service_count(ray.cluster_resources(), ref.address, device=device, count=count)
        with RayPool(replace(ref, count=number), device, service=service) as pool:
            try:
                first = [facts_of(worker) for worker in pool.workers]
            except WorkerLostError as err:
                raise LostAtStartError(str(err)) from err
            check_paths(first, ref.paths)
            yield pool.workers, check_machine
    finally:
        CONNECTION.release()


def service_count(
    resources: dict[str, Any], address: str, *, device: str, count: int | None
) -> int:
    """Return the number of processes on a Ray with these `resources`.

    Raises WorkersError for missing GPUs.
    """
    gpus = int(resources.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise WorkersError(
            f"the Ray at {address} has no GPU that it can assign: start Ray on machines with GPUs, "
            "check that CUDA_VISIBLE_DEVICES hides none, or try it out on CPUs (--device cpu "
            "--workers N)"
        )
    return count or gpus
