"""Version check: driver and workers must agree on messages and on results."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..messages import WorkerFacts


class VersionsError(ValueError):
    """A worker has other versions than the driver. The message has both."""


def check_versions(driver: WorkerFacts, workers: Sequence[WorkerFacts]) -> None:
    """Raise VersionsError if a worker, given by rank, has other versions than the driver.

    WanStream must be the same version; torch, diffusers and Python must agree in the first two numbers.
    """
    wrong = [
        f"worker {rank} on {worker.node} has {theirs}, the driver on {driver.node} has {ours}"
        for rank, worker in enumerate(workers)
        for ours, theirs in _differences(driver, worker)
    ]
    if wrong:
        raise VersionsError("; ".join(wrong) + ": install the same versions on all machines")


def _differences(driver: WorkerFacts, worker: WorkerFacts) -> list[tuple[str, str]]:
    """Return (name and version of the driver, of the worker) for every difference."""
    pairs = [
        ("WanStream", driver.wanstream, worker.wanstream, driver.wanstream == worker.wanstream),
        *(
            (name, ours, theirs, series(ours) == series(theirs))
            for name, ours, theirs in (
                ("torch", driver.torch, worker.torch),
                ("diffusers", driver.diffusers, worker.diffusers),
                ("Python", driver.python, worker.python),
            )
        ),
    ]
    return [(f"{name} {ours}", f"{name} {theirs}") for name, ours, theirs, fits in pairs if not fits]


def series(version: str) -> str:
    """Return "2.13" for "2.13.1+cu130"; the version itself if it does not start with two numbers."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version
