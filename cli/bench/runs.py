"""Runs of a benchmark over workers, and their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ...host import StartPool, start_pool
from ...nodes.runs import TrialTimes, pause, tensor_digest, with_steps
from ...sampling import DenoiseRequest
from ...schema import ExpertsRef, Timeline, WorkersRef
from .cases import BenchCase

if TYPE_CHECKING:
    import torch

    from ...distributed import Pool

CLOSE_TIMEOUT_S = 120.0
"""Seconds that workers may take to close their experts."""


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """Result of one run."""

    wall_s: float
    """Seconds from the request to the latents."""
    timeline: Timeline
    """One record per step, over all videos."""
    ranks: Mapping[int, Timeline]
    latents: str
    """SHA-256 of the latents."""
    gathered_bytes: int
    counts: bool
    """False for a warm-up."""


@dataclass(frozen=True, kw_only=True)
class CaseRuns:
    """All runs of a case, the first one on workers with closed experts; `failed` is an error message."""

    case: BenchCase
    start_s: float
    """Seconds from the start of the workers until all of them were ready."""
    runs: tuple[BenchRun, ...] = ()
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings that all cases share."""

    experts: ExpertsRef
    request: DenoiseRequest
    times: TrialTimes
    workers: WorkersRef
    """Number and layout are replaced by those of each case."""
    device: torch.device


def run_cases(
    bench: Bench, cases: Sequence[BenchCase], log: Callable[[str], None], start: StartPool = start_pool
) -> Iterator[CaseRuns]:
    """Run all cases, in their order; consecutive cases with the same number of workers share them.

    An error of a case is in its `failed` and does not end the others. Raises the errors of starting workers.
    """
    for count, group in groupby(cases, key=lambda case: case.workers):
        log(f"starting {count} worker{'s' * (count != 1)}")
        started = time.monotonic()
        with closing(start(replace(bench.workers, count=count), bench.device)) as pool:
            start_s = time.monotonic() - started
            for case in group:
                yield _run_case(bench, case, pool, start_s, log)


def _run_case(bench: Bench, case: BenchCase, pool: Pool, start_s: float, log: Callable[[str], None]) -> CaseRuns:
    from ...distributed import Driver, WorkerLostError

    ref = replace(bench.workers, count=case.workers, mesh=case.mesh)
    driver, request = Driver(pool, ref, case.mesh), with_steps(bench.request, case.steps)
    for request_to_close in [worker.ask("close") for worker in pool.workers]:
        with suppress(WorkerLostError):  # lost in the previous case; the driver replaces it
            request_to_close.result(CLOSE_TIMEOUT_S)
    runs = list[BenchRun]()
    for number in range(bench.times.runs):
        log(f"{case.name}: run {number + 1} of {bench.times.runs}")
        pause(bench.times.cooldown_s, lambda: None)
        started = time.monotonic()
        try:
            ran = driver.denoise(bench.experts, request, case.policy)
        except (ValueError, RuntimeError, OSError) as err:
            return CaseRuns(case=case, start_s=start_s, runs=tuple(runs), failed=str(err).splitlines()[0])
        runs.append(
            BenchRun(
                wall_s=time.monotonic() - started,
                timeline=ran.timeline,
                ranks=ran.timelines,
                latents=tensor_digest(ran.latents),
                gathered_bytes=ran.gathered_bytes,
                counts=number >= bench.times.warmup,
            )
        )
    return CaseRuns(case=case, start_s=start_s, runs=tuple(runs))
