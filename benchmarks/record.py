"""The folder of benchmark results, and the writing of one with its method, machine and versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanstream.bench import Result

RESULTS = Path(__file__).parent / "results"


def record(case: str, *, method: str, figures: dict[str, Any], folder: Path = RESULTS, **measured: Any) -> Path:
    """Save `figures` as <case>_<hardware>_<yyyymmdd>.json in `folder` and return the path.

    `measured` are `hardware` and `versions` of another machine where it was measured there.
    """
    return Result(case=case, method=method, figures=figures, **measured).save(folder)
