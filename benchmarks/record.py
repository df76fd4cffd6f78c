"""Writes one benchmark result: the figures and how they came about. A number without its method is no number."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"


def hardware_name() -> str:
    """The GPU's name, or the number of CPU cores, in a form that suits a file name."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    return f"cpu-{psutil.cpu_count()}-cores"


def hardware() -> dict[str, Any]:
    """The machine that this process runs on."""
    return {
        "name": hardware_name(),
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def versions() -> dict[str, str]:
    """What is measured: libraries, Python and our own commit."""
    installed = {name: version(name) for name in ("torch", "diffusers", "accelerate", "safetensors")}
    return installed | {"python": platform.python_version(), "commit": _commit()}


def record(
    case: str,
    *,
    method: str,
    figures: dict[str, Any],
    folder: Path = RESULTS,
    measured_on: dict[str, Any] | None = None,
    measured_with: dict[str, str] | None = None,
) -> Path:
    """Save `figures` as <case>_<hardware>_<yyyymmdd>.json in `folder` and return the path.

    `measured_on` and `measured_with` are `hardware()` and `versions()` of another machine where it was measured there.
    """
    machine = measured_on or hardware()
    result = {
        "case": case,
        "method": method,
        "figures": figures,
        "hardware": machine,
        "versions": measured_with or versions(),
        "date": date.today().isoformat(),
    }
    path = folder / f"{case}_{machine['name']}_{date.today():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def _commit() -> str:
    """The checkout's commit; files that were copied without their history have none."""
    root = Path(__file__).parent.parent
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown (not a git checkout)"
