"""Which versions work together: what driver and workers send each other, and compute, must mean the same to both."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..messages import WorkerFacts


class VersionsError(ValueError):
    """A worker has other versions than the driver; the message names both."""


def check_versions(driver: WorkerFacts, workers: Sequence[WorkerFacts]) -> None:
    """Raise VersionsError for workers, given by rank, that do not fit the driver.

    WanStream must be the same version; torch, diffusers and Python the same up to the second number.
    """
    wrong = [
        f"worker {rank} on {worker.node} has {theirs}, the driver on {driver.node} has {ours}"
        for rank, worker in enumerate(workers)
        for ours, theirs in _differences(driver, worker)
    ]
    if wrong:
        raise VersionsError("; ".join(wrong) + ": install the same versions on all machines")


def _differences(driver: WorkerFacts, worker: WorkerFacts) -> list[tuple[str, str]]:
    """(the driver's, the worker's) for everything that does not fit, in words."""
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
    """ "2.13" of "2.13.1+cu130"; the version itself where it does not begin with two numbers."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version
