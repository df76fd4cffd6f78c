"""Folder of benchmark results, and a writer that adds method, machine and versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanstream.bench import Result

RESULTS = Path(__file__).parent / "results"


def record(case: str, *, method: str, figures: dict[str, Any], folder: Path = RESULTS, **measured: Any) -> Path:
    """Save `figures` as <case>_<hardware>_<yyyymmdd>.json in `folder` and return the path.

    `measured` takes `hardware` and `versions` if the case was measured on another machine.
    """
    return Result(case=case, method=method, figures=figures, **measured).save(folder)
