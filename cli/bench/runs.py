"""Makes the runs of a benchmark over workers and keeps their figures."""

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

ANSWER_S = 120.0
"""How long workers may take to close their experts."""


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One run. Times in seconds."""

    wall_s: float
    """From the request to the latents."""
    timeline: Timeline
    """One record per step, over all videos."""
    ranks: Mapping[int, Timeline]
    latents: str
    """SHA-256 of the result."""
    gathered_bytes: int
    counts: bool
    """False for a warm-up."""


@dataclass(frozen=True, kw_only=True)
class CaseRuns:
    """All runs of a case, the first one on workers that had closed their experts; or why there are none."""

    case: BenchCase
    start_s: float
    """What starting the workers took, until all of them answered."""
    runs: tuple[BenchRun, ...] = ()
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured with: the same experts and the same request for every case."""

    experts: ExpertsRef
    request: DenoiseRequest
    times: TrialTimes
    workers: WorkersRef
    """Their number and layout are those of each case."""
    device: torch.device


def run_cases(
    bench: Bench, cases: Sequence[BenchCase], tell: Callable[[str], None], start: StartPool = start_pool
) -> Iterator[CaseRuns]:
    """Run all cases, in their order; workers are started once for all cases with the same number of them.

    A case that cannot run says so in `failed`, and the next ones go on. Raises what starting workers raises.
    """
    for count, group in groupby(cases, key=lambda case: case.workers):
        tell(f"starting {count} worker{'s' * (count != 1)}")
        begun = time.monotonic()
        with closing(start(replace(bench.workers, count=count), bench.device)) as pool:
            start_s = time.monotonic() - begun
            for case in group:
                yield _run_case(bench, case, pool, start_s, tell)


def _run_case(bench: Bench, case: BenchCase, pool: Pool, start_s: float, tell: Callable[[str], None]) -> CaseRuns:
    from ...distributed import Driver, WorkerLostError

    ref = replace(bench.workers, count=case.workers, mesh=case.mesh)
    driver, request = Driver(pool, ref, case.mesh), with_steps(bench.request, case.steps)
    for asked in [worker.ask("close") for worker in pool.workers]:
        with suppress(WorkerLostError):  # in the case before; the driver replaces it
            asked.result(ANSWER_S)
    runs = list[BenchRun]()
    for number in range(bench.times.runs):
        tell(f"{case.name}: run {number + 1} of {bench.times.runs}")
        pause(bench.times.cooldown_s, lambda: None)
        begun = time.monotonic()
        try:
            ran = driver.denoise(bench.experts, request, case.policy)
        except (ValueError, RuntimeError, OSError) as err:
            return CaseRuns(case=case, start_s=start_s, runs=tuple(runs), failed=str(err).splitlines()[0])
        runs.append(
            BenchRun(
                wall_s=time.monotonic() - begun,
                timeline=ran.timeline,
                ranks=ran.timelines,
                latents=tensor_digest(ran.latents),
                gathered_bytes=ran.gathered_bytes,
                counts=number >= bench.times.warmup,
            )
        )
    return CaseRuns(case=case, start_s=start_s, runs=tuple(runs))
