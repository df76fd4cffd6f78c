"""Writes what a benchmark over workers has found: figures, and how they came about."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..metrics.surroundings import surroundings
from .bench_figures import CaseFigures
from .bench_tables import report

CASE = "workers"
LIBRARIES = ("diffusers", "ray", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is written down."""

    method: str
    figures: Sequence[CaseFigures]
    without: Sequence[tuple[str, str]]
    device: torch.device


def save(record: Record, folder: Path) -> tuple[Path, Path]:
    """Write `workers_<hardware>_<yyyymmdd>.json` and `.md` into `folder`; returns both paths."""
    machine = surroundings(record.device)
    versions = {**_libraries(), "commit": _commit()}
    hardware = hardware_name(record.device)
    result = {
        "case": CASE,
        "method": record.method,
        "figures": {
            "cases": [figures.to_dict() for figures in record.figures],
            "not_measured": [{"case": name, "because": why} for name, why in record.without],
        },
        "hardware": {"name": hardware, **machine},
        "versions": versions,
        "date": date.today().isoformat(),
    }
    stem = f"{CASE}_{hardware}_{date.today():%Y%m%d}"
    data, page = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    title = f"Workers on {hardware}"
    told = {**machine, **versions}
    text = report(title, record.figures, method=record.method, machine=told, without=record.without)
    page.write_text(text, encoding="utf-8")
    return data, page


def hardware_name(device: torch.device) -> str:
    """The GPUs' name and number, or the number of CPU cores, in a form that suits a file name."""
    if device.type == "cuda":
        name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
        return f"{torch.cuda.device_count()}x-{name}"
    return f"cpu-{os.cpu_count()}-cores"


def _libraries() -> dict[str, str]:
    """What is installed of them."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str:
    """The checkout's commit; an installed package has none."""
    root = Path(__file__).parent.parent
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown (no git)"
    return told.stdout.strip() or "unknown (not a git checkout)"
