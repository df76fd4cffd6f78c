"""The newest result of each case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """One file of benchmarks/results, as benchmarks/record.py wrote it."""

    file: str
    case: str
    method: str
    figures: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str

    @property
    def source(self) -> str:
        """Where and with what it was measured, in one line of Markdown."""
        machine = f"{self.hardware['name']}, {self.hardware['ram_gb']:g} GB RAM"
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"`{self.file}`: {self.date}, {machine}; {software}."


def newest_results(folder: Path) -> dict[str, Result]:
    """By case; of several results of a case the one of the latest date."""
    newest: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        result = Result(file=f"benchmarks/results/{path.name}", **data)
        if result.case not in newest or newest[result.case].date <= result.date:
            newest[result.case] = result
    return newest
