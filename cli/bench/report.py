"""Report for `wanstream bench`: each case against one worker, as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
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
from ...schema.records import MemorySample, StepMemory, Timeline
from ...schema.text import format_seconds, format_size
from .cases import BenchCase

Figures = dict[str, Any]

CASE = "workers"
TIMES = (
    "configuration",
    "start of workers s",
    "loading s",
    "generation",
    "total s",
    "speedup",
    "scaling efficiency",
    "latents of one worker",
    "weights moved",
    "worker to worker",
)
MEMORY = ("configuration", "worker", "steps", "peak memory", "average memory")


def save(
    cases: Sequence[BenchCase], *, method: str, device: torch.device, folder: Path
) -> tuple[Path, Path]:
    """Write `workers_<hardware>_<yyyymmdd>.json` and `.md` into `folder`, and return both paths."""
    machine = describe_machine(device)
    result = Result(
        case=CASE,
        method=method,
        figures={
            "cases": figures(cases),
            "not_measured": [
                {"case": case.name, "because": case.failed} for case in cases if case.failed
            ],
        },
        hardware={**hardware(device), **machine},
        versions=versions(),
    )
    path = folder / f"{result.name}.md"
    path.write_text(page(result, cases, {**machine, **result.versions}), encoding="utf-8")
    return result.save(folder), path


def page(result: Result, cases: Sequence[BenchCase], machine: Mapping[str, str]) -> str:
    """Return all figures as Markdown tables."""
    counted = [case for case in cases if case.counted]
    found = result.figures["cases"]
    times = tuple(map(_times, counted, found))
    without = tuple(tuple(each.values()) for each in result.figures["not_measured"])
    tables = [
        Table(title="Loading and generation", head=TIMES, rows=times),
        Table(title="Workers, their steps and their memory", head=MEMORY, rows=_workers(found)),
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
    """Return the JSON for every case with counted runs, in their order; times in seconds.

    `speedup`, `efficiency` and `same_latents` are relative to one worker with the same steps and
    policy, None if this case is missing.
    """
    counted = [case for case in cases if case.counted]
    alone = {(case.steps, case.policy): case for case in counted if case.mesh.size == 1}
    return [_figures(case, alone.get((case.steps, case.policy))) for case in counted]


def _figures(case: BenchCase, alone: BenchCase | None) -> Figures:
    counted = case.counted
    first = case.trials[0]
    wall = _wall(case)
    # With an even number of runs, the faster one of the two in the middle.
    median = sorted(counted, key=lambda run: run.wall_s)[(len(counted) - 1) // 2]
    ranks = sorted(set().union(*(run.ranks for run in counted)))
    compared: Figures = {"same_latents": None, "speedup": None, "efficiency": None}
    if alone is not None:
        speedup = _wall(alone).median / wall.median
        compared = {
            # `latents` has one digest only if all runs agree.
            "same_latents": case.latents == {alone.trials[0].latents},
            "speedup": speedup,
            "efficiency": speedup / case.mesh.size,
        }
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
        # A rank may be missing in a run: a faster worker group in the same stage may take all
        # videos.
        "memory": {
            rank: _memory([run.ranks[rank] for run in counted if rank in run.ranks])
            for rank in ranks
        },
        "moved_bytes": sum(each.bytes_moved for each in median.ranks.values()),
        "gathered_bytes": median.gathered_bytes,
        "latents": median.latents,
        **compared,
    }


def _wall(case: BenchCase) -> Spread:
    """Return the seconds of the counted runs, from the request to the latents."""
    spread = Spread.of(run.wall_s for run in case.counted)
    assert spread is not None
    return spread


def _memory(timelines: Sequence[Timeline]) -> Figures:
    """Return one worker's bytes in the counted runs, and the steps."""
    steps = [*chain.from_iterable(each.steps for each in timelines)]
    sampled = _known_bytes(chain.from_iterable(each.memory for each in timelines))
    held = _known_bytes(step.memory for step in steps)
    return {
        "peak": max([*sampled, *held], default=0),
        "average": round(mean(sampled or held or [0])),
        "steps": [*dict.fromkeys(step.index for step in steps)],
    }


def _known_bytes(records: Iterable[StepMemory | MemorySample]) -> list[int]:
    return [nbytes for nbytes in map(memory_bytes, records) if nbytes is not None]


def _times(measured: BenchCase, case: Figures) -> tuple[str, ...]:
    return (
        case["name"],
        format_seconds(case["start_s"]),
        _known(case["load_s"], format_seconds),
        _wall(measured).text("s"),
        format_seconds(case["total_s"]),
        _known(case["speedup"], "{:.2f}x".format),
        _known(case["efficiency"], lambda share: f"{100 * share:.0f} %"),
        {None: "-", True: "equal", False: "other"}[case["same_latents"]],
        format_size(case["moved_bytes"]),
        format_size(case["gathered_bytes"]),
    )


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _workers(found: Sequence[Figures]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for case in found:
        for rank, memory in case["memory"].items():
            sizes = format_size(memory["peak"]), format_size(memory["average"])
            rows.append((case["name"], str(rank), _ranges(memory["steps"]), *sizes))
    return tuple(rows)


def _ranges(steps: Sequence[int]) -> str:
    """Return 0-based steps as 1-based ranges, like `1-4, 7`."""
    ranges = []
    # Consecutive steps have one difference to their position.
    for _, group in groupby(enumerate(sorted(steps), 1), key=lambda pair: pair[1] - pair[0]):
        numbers = [step + 1 for _, step in group]
        ranges.append("-".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))))
    return ", ".join(ranges)
