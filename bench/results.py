"""Result files: the figures of one measurement with their method, machine, versions and date, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from .machine_info import hardware, versions


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement."""

    case: str
    """Name of the measurement, used in file names."""
    method: str
    figures: Mapping[str, Any]
    hardware: Mapping[str, Any] = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: date.today().isoformat())

    @property
    def name(self) -> str:
        """File name without its suffix: `<case>_<hardware>_<yyyymmdd>`."""
        return f"{self.case}_{self.hardware['name']}_{self.date.replace('-', '')}"

    @property
    def source(self) -> str:
        """Date, machine and versions in one line."""
        machine = f"{self.hardware['name']}, {self.hardware['ram_gb']:g} GB RAM"
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {machine}; {software}"

    def save(self, folder: Path) -> Path:
        """Write the result into `folder`, which is created if necessary, and return the path of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def newest_results(folder: Path) -> dict[str, Result]:
    """Return the latest result of each case in `folder`, by case."""
    results = (Result(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json")))
    return {result.case: result for result in sorted(results, key=lambda result: result.date)}
