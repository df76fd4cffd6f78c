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


def record(case: str, *, method: str, figures: dict[str, Any]) -> Path:
    """Save `figures` as results/<case>_<hardware>_<yyyymmdd>.json and return the path."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    result = {
        "case": case,
        "method": method,
        "figures": figures,
        "hardware": {
            "name": hardware_name(),
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "versions": {name: version(name) for name in ("torch", "diffusers", "safetensors")}
        | {"python": platform.python_version(), "commit": commit.stdout.strip()},
        "date": date.today().isoformat(),
    }
    path = RESULTS / f"{case}_{hardware_name()}_{date.today():%Y%m%d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path
