"""Report of `wanstream bench`: the figures of each case, compared with one worker, as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ...bench import (
    Report,
    Result,
    Spread,
    Table,
    describe_machine,
    hardware,
    memory_bytes,
    policy_name,
    summary,
    versions,
)
from ...schema import Timeline, format_seconds, format_size
from .cases import BenchCase

Figures = dict[str, Any]

CASE = "workers"
TIMES = (
    *("configuration", "start of workers s", "loading s", "generation", "total s", "speedup", "scaling efficiency"),
    *("latents of one worker", "weights moved", "worker to worker"),
)
MEMORY = ("configuration", "worker", "steps", "peak memory", "average memory")


def save(cases: Sequence[BenchCase], *, method: str, device: torch.device, folder: Path) -> tuple[Path, Path]:
    """Write `workers_<hardware>_<yyyymmdd>.json` and `.md` into `folder`; return both paths."""
    machine = describe_machine(device)
    result = Result(
        case=CASE,
        method=method,
        figures={
            "cases": figures(cases),
            "not_measured": [{"case": case.name, "because": case.failed} for case in cases if case.failed],
        },
        hardware={**hardware(device), **machine},
        versions=versions(),
    )
    path = folder / f"{result.name}.md"
    path.write_text(page(result, cases, {**machine, **result.versions}), encoding="utf-8")
    return result.save(folder), path


def page(result: Result, cases: Sequence[BenchCase], machine: Mapping[str, str]) -> str:
    """Return all figures as tables in Markdown."""
    counted, found = [case for case in cases if case.counted], result.figures["cases"]
    without = tuple(tuple(each.values()) for each in result.figures["not_measured"])
    tables = [
        Table(title="Loading and generation", head=TIMES, rows=tuple(map(_times, counted, found))),
        Table(title="Workers, their steps and their memory", head=MEMORY, rows=tuple(_workers(found))),
    ]
    if without:
        tables.append(Table(title="Not measured", head=("configuration", "reason"), rows=without))
    report = Report(
        title=f"Workers on {result.hardware['name']}",
        variants=tuple(counted),
        method={"Method": result.method},
        machine=machine,
        planned=sum(len(case.trials) for case in cases),
    )
    return summary(report, tables)


def figures(cases: Sequence[BenchCase]) -> list[Figures]:
    """Return the JSON of every case with counted runs, in their order; times in seconds.

    `speedup`, `efficiency` and `same_latents` are relative to one worker with the same steps and policy, None if that
    case is missing.
    """
    counted = [case for case in cases if case.counted]
    alone = {(case.steps, case.policy): case for case in counted if case.mesh.size == 1}
    return [_figures(case, alone.get((case.steps, case.policy))) for case in counted]


def _figures(case: BenchCase, alone: BenchCase | None) -> Figures:
    counted, first, wall = case.counted, case.trials[0], _wall(case)
    median = sorted(counted, key=lambda run: run.wall_s)[(len(counted) - 1) // 2]
    speedup = None if alone is None else _wall(alone).median / wall.median
    ranks = sorted({rank for run in counted for rank in run.ranks})
    return {
        "name": case.name,
        "workers": case.mesh.size,
        "layout": str(case.mesh),
        "mode": policy_name(case.policy),
        "steps": case.steps,
        "start_s": case.start_s,
        # From the request to the first block's compute, on workers with closed experts.
        "load_s": first.timeline.first_block_s,
        "generation_s": {"median": wall.median, "least": wall.low, "most": wall.high},
        "total_s": case.start_s + first.wall_s,
        "step_s": [step.wall_s for step in median.timeline.steps],
        "experts": [step.expert for step in median.timeline.steps],
        # A rank may be missing in a run: among the worker groups of one stage, a faster one may take all videos.
        "memory": {rank: _memory([run.ranks[rank] for run in counted if rank in run.ranks]) for rank in ranks},
        "moved_bytes": sum(each.bytes_moved for each in median.ranks.values()),
        "gathered_bytes": median.gathered_bytes,
        "latents": median.latents,
        "same_latents": None if alone is None else case.latents == {alone.trials[0].latents},
        "speedup": speedup,
        "efficiency": None if speedup is None else speedup / case.mesh.size,
    }


def _wall(case: BenchCase) -> Spread:
    """Return the seconds of the counted runs, from the request to the latents."""
    spread = Spread.of(run.wall_s for run in case.counted)
    assert spread is not None
    return spread


def _memory(timelines: Sequence[Timeline]) -> Figures:
    """Return the bytes of one worker in the counted runs, and the steps that it computed."""
    steps = [step for each in timelines for step in each.steps]
    sampled = [nbytes for each in timelines for sample in each.memory if (nbytes := memory_bytes(sample)) is not None]
    held = [nbytes for step in steps if (nbytes := memory_bytes(step)) is not None]
    return {
        "peak": max([*sampled, *held], default=0),
        "average": round(mean(sampled or held or [0])),
        "steps": [*dict.fromkeys(step.index for step in steps)],
    }


def _times(measured: BenchCase, case: Figures) -> tuple[str, ...]:
    return (
        case["name"],
        format_seconds(case["start_s"]),
        "-" if case["load_s"] is None else format_seconds(case["load_s"]),
        _wall(measured).text("s"),
        format_seconds(case["total_s"]),
        "-" if case["speedup"] is None else f"{case['speedup']:.2f}x",
        "-" if case["efficiency"] is None else f"{100 * case['efficiency']:.0f} %",
        {None: "-", True: "equal", False: "other"}[case["same_latents"]],
        format_size(case["moved_bytes"]),
        format_size(case["gathered_bytes"]),
    )


def _workers(found: Sequence[Figures]) -> Iterator[tuple[str, ...]]:
    for case in found:
        for rank, memory in case["memory"].items():
            steps = _ranges(memory["steps"])
            yield case["name"], str(rank), steps, format_size(memory["peak"]), format_size(memory["average"])


def _ranges(steps: Sequence[int]) -> str:
    """Return 0-based steps as 1-based ranges, like `1-4, 7`."""
    groups = [[*group] for _, group in groupby(enumerate(sorted(steps)), key=lambda pair: pair[1] - pair[0])]
    ends = [(group[0][1] + 1, group[-1][1] + 1) for group in groups]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
