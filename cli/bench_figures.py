"""What a benchmark over workers says of each case: from its runs, and from those of one worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from ..plan import StepRecord, Timeline
from .bench_cases import BenchCase
from .bench_runs import BenchRun, CaseRuns


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, least and most of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        return cls(median=median(found), least=found[0], most=found[-1])


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker in the counted runs: of its device, or its RAM where the device has no counter."""

    peak: int
    average: int
    steps: tuple[int, ...]
    """Which steps it computed."""


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """Times in seconds. `speedup` is against one worker with the same steps and policy; None where that is missing."""

    name: str
    workers: int
    layout: str
    mode: str
    steps: int
    start_s: float
    load_s: float | None
    """From the request to the first block's compute, on workers that had closed their experts."""
    generation_s: Spread
    """A counted run, from the request to its latents."""
    total_s: float
    """Starting, and the first run."""
    step_s: tuple[float, ...]
    """Each step of the run in the middle."""
    experts: tuple[str, ...]
    memory: Mapping[int, WorkerMemory]
    """By rank."""
    moved_bytes: int
    """Of weights, in one run."""
    gathered_bytes: int
    """From worker to worker, in one run."""
    latents: str
    same_latents: bool | None
    """Whether one worker makes the same, bit for bit."""
    speedup: float | None
    efficiency: float | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def figures(measured: Sequence[CaseRuns]) -> list[CaseFigures]:
    """Of every case that has counted runs, in their order."""
    alone = {_twin(each.case): each for each in measured if each.case.workers == 1 and _counted(each)}
    return [_figures(each, alone.get(_twin(each.case))) for each in measured if _counted(each)]


def _figures(runs: CaseRuns, alone: CaseRuns | None) -> CaseFigures:
    case, counted, first = runs.case, _counted(runs), runs.runs[0]
    spread = Spread.of(run.wall_s for run in counted)
    usual = sorted(counted, key=lambda run: run.wall_s)[(len(counted) - 1) // 2]
    speedup = None if alone is None else Spread.of(run.wall_s for run in _counted(alone)).median / spread.median
    digests = {run.latents for run in runs.runs}
    ranks = sorted({rank for run in counted for rank in run.ranks})
    return CaseFigures(
        name=case.name,
        workers=case.workers,
        layout=str(case.mesh),
        mode=case.mode,
        steps=case.steps,
        start_s=runs.start_s,
        load_s=first.timeline.first_block_s,
        generation_s=spread,
        total_s=runs.start_s + first.wall_s,
        step_s=tuple(step.wall_s for step in usual.timeline.steps),
        experts=tuple(step.expert for step in usual.timeline.steps),
        # Of cells of one stage a faster one may take all videos of a run.
        memory={rank: _memory([run.ranks[rank] for run in counted if rank in run.ranks]) for rank in ranks},
        moved_bytes=sum(each.bytes_moved for each in usual.ranks.values()),
        gathered_bytes=usual.gathered_bytes,
        latents=usual.latents,
        same_latents=None if alone is None else digests == {alone.runs[0].latents},
        speedup=speedup,
        efficiency=None if speedup is None else speedup / case.workers,
    )


def _counted(runs: CaseRuns) -> list[BenchRun]:
    return [run for run in runs.runs if run.counts]


def _twin(case: BenchCase) -> tuple[object, int]:
    """What one worker has in common with others that it is compared with."""
    return case.policy, case.steps


def _memory(timelines: Sequence[Timeline]) -> WorkerMemory:
    steps = [step for each in timelines for step in each.steps]
    samples = [
        sample.rss_bytes if sample.device_bytes is None else sample.device_bytes
        for each in timelines
        for sample in each.memory
    ]
    held = [nbytes for step in steps if (nbytes := _held(step)) is not None]
    taken = tuple(dict.fromkeys(step.index for step in steps))
    return WorkerMemory(
        peak=max([*samples, *held], default=0), average=round(mean(samples or held or [0])), steps=taken
    )


def _held(step: StepRecord) -> int | None:
    return step.rss_bytes if step.device_bytes is None else step.device_bytes
