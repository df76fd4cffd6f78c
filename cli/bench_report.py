"""Report of `wanstream bench`: the figures of each case from its runs and those of one worker, and both files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ..bench import (
    Report,
    Result,
    Spread,
    Table,
    Trial,
    Variant,
    hardware,
    held_bytes,
    machine_words,
    summary,
    versions,
)
from ..plan import Timeline
from ..plan.figure_words import seconds_text, size_text
from .bench_cases import BenchCase
from .bench_runs import BenchRun, CaseRuns

CASE = "workers"
TIMES = (
    *("configuration", "start of workers s", "loading s", "generation", "total s", "speedup", "scaling efficiency"),
    *("latents of one worker", "weights moved", "from worker to worker"),
)
MEMORY = ("configuration", "worker", "steps", "peak memory", "average memory")


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
        spread = self.generation_s
        return {**asdict(self), "generation_s": {"median": spread.median, "least": spread.low, "most": spread.high}}


def save(
    measured: Sequence[CaseRuns],
    *,
    method: str,
    without: Sequence[tuple[str, str]],
    device: torch.device,
    folder: Path,
) -> tuple[Path, Path]:
    """Write `workers_<hardware>_<yyyymmdd>.json` and `.md` into `folder`; return both paths.

    `without` are cases that have no figures, with the reason.
    """
    result = Result(
        case=CASE,
        method=method,
        figures={
            "cases": [case.to_dict() for case in figures(measured)],
            "not_measured": [{"case": name, "because": why} for name, why in without],
        },
        hardware={**hardware(device), **machine_words(device)},
        versions=versions(),
    )
    machine = {**machine_words(device), **result.versions}
    text = page(f"Workers on {result.hardware['name']}", measured, method=method, machine=machine, without=without)
    path = folder / f"{result.name}.md"
    path.write_text(text, encoding="utf-8")
    return result.save(folder), path


def page(
    title: str,
    measured: Sequence[CaseRuns],
    *,
    method: str,
    machine: Mapping[str, str],
    without: Sequence[tuple[str, str]],
) -> str:
    """All figures as tables in Markdown."""
    found = figures(measured)
    tables = [
        Table(title="Loading and generation", head=TIMES, rows=tuple(map(_times, found))),
        Table(title="Workers, their steps and their memory", head=MEMORY, rows=tuple(_workers(found))),
    ]
    if without:
        tables.append(Table(title="Not measured", head=("configuration", "reason"), rows=tuple(without)))
    report = Report(
        title=title,
        variants=tuple(_variant(runs) for runs in measured if _counted(runs)),
        method={"Method": method},
        machine=machine,
        planned=sum(len(runs.runs) for runs in measured),
    )
    return summary(report, tables)


def figures(measured: Sequence[CaseRuns]) -> list[CaseFigures]:
    """Of every case that has counted runs, in their order."""
    alone = {_twin(each.case): each for each in measured if each.case.workers == 1 and _counted(each)}
    return [_figures(each, alone.get(_twin(each.case))) for each in measured if _counted(each)]


def _figures(runs: CaseRuns, alone: CaseRuns | None) -> CaseFigures:
    case, counted, first = runs.case, _counted(runs), runs.runs[0]
    spread = _wall(runs)
    usual = sorted(counted, key=lambda run: run.wall_s)[(len(counted) - 1) // 2]
    speedup = None if alone is None else _wall(alone).median / spread.median
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


def _wall(runs: CaseRuns) -> Spread:
    spread = Spread.of(run.wall_s for run in _counted(runs))
    assert spread is not None
    return spread


def _twin(case: BenchCase) -> tuple[object, int]:
    """What one worker has in common with others that it is compared with."""
    return case.policy, case.steps


def _memory(timelines: Sequence[Timeline]) -> WorkerMemory:
    samples = [held_bytes(sample) for each in timelines for sample in each.memory]
    steps = [step for each in timelines for step in each.steps]
    held = [nbytes for step in steps if (nbytes := held_bytes(step)) is not None]
    known = [nbytes for nbytes in samples if nbytes is not None]
    return WorkerMemory(
        peak=max([*known, *held], default=0),
        average=round(mean(known or held or [0])),
        steps=tuple(dict.fromkeys(step.index for step in steps)),
    )


def _variant(runs: CaseRuns) -> Variant:
    """The case as a variant of a report: cases of as many steps have the same latents."""
    case = runs.case
    trials = (Trial(timeline=run.timeline, latents=run.latents, warm_up=not run.counts) for run in runs.runs)
    settings = {"Steps": str(case.steps), "Workers": str(case.workers), "Layout": str(case.mesh), "Policy": case.mode}
    return Variant(name=case.name, settings=settings, job=f"{case.steps} steps", trials=tuple(trials))


def _times(case: CaseFigures) -> tuple[str, ...]:
    return (
        case.name,
        seconds_text(case.start_s),
        "-" if case.load_s is None else seconds_text(case.load_s),
        case.generation_s.text("s"),
        seconds_text(case.total_s),
        "-" if case.speedup is None else f"{case.speedup:.2f}x",
        "-" if case.efficiency is None else f"{100 * case.efficiency:.0f} %",
        {None: "-", True: "equal", False: "other"}[case.same_latents],
        size_text(case.moved_bytes),
        size_text(case.gathered_bytes),
    )


def _workers(found: Sequence[CaseFigures]) -> Iterator[tuple[str, ...]]:
    for case in found:
        for rank, memory in case.memory.items():
            yield case.name, str(rank), _step_words(memory), size_text(memory.peak), size_text(memory.average)


def _step_words(memory: WorkerMemory) -> str:
    """`1-4, 7`, counted from 1."""
    runs: list[list[int]] = []
    for step in sorted(memory.steps):
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0] + 1}-{run[-1] + 1}" if len(run) > 1 else str(run[0] + 1) for run in runs)
