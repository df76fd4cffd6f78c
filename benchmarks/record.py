"""Benchmark results folder, with readers and a writer that adds method, machine and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wanstream.bench import Result

RESULTS = Path(__file__).parent / "results"


def record(
    case: str, *, method: str, figures: dict[str, Any], folder: Path = RESULTS, **measured: Any
) -> Path:
    """Save `figures` as <case>_<hardware>_<yyyymmdd>.json in `folder` and return the path.

    `measured` takes `hardware` and `versions` if the case was measured on another machine.
    """
    return Result(case=case, method=method, figures=figures, **measured).save(folder)


def saved_results(folder: Path = RESULTS, *, names: str = "*") -> list[Result]:
    """Return the results in `folder` with file names that match `names`, by file name."""
    return [
        Result(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob(f"{names}.json"))
    ]


def newest_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the latest result by case in `folder`."""
    results = sorted(saved_results(folder), key=lambda result: result.date)
    return {result.case: result for result in results}
