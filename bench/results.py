"""Result files: figures as JSON with their method, date, machine, library versions and commit.

No host or folder is named.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..schema import format_size

# torch takes seconds to import, and `wanstream plan` writes its tables without it: functions import it.
if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")
LIBRARIES = ("diffusers", "accelerate", "ray", "safetensors")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Describe device, processor, memory, system and versions for a reader."""
    import torch

    description = {
        "Device": device_name(device),
        "Processor": f"{processor_name()}, {os.cpu_count()} cores ({torch.get_num_threads()} for torch)",
        "RAM": format_size(psutil.virtual_memory().total),
        "System": f"{platform.system()} {platform.release()}",
        "Versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    built_for = {name: getattr(torch.version, name.lower(), None) for name in ("CUDA", "HIP", "XPU")}
    if device.type != "cpu":
        description["Versions"] += "".join(f", {name} {version}" for name, version in built_for.items() if version)
    return description


def device_name(device: torch.device) -> str:
    """Return name and memory of a GPU, like `NVIDIA RTX 4090, 25.3 GB`, or the type of another device, like `CPU`."""
    from ..devices import runtime_for

    runtime = runtime_for(device)
    if runtime is None:
        return device.type.upper()
    return f"{runtime.name()}, {format_size(runtime.memory().total)}"


def processor_name() -> str:
    """Return the model name of the processor, or its architecture."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def hardware(device: torch.device | None = None) -> dict[str, Any]:
    """Return the machine of a result file: `name` (part of the file name), processor, cores and RAM.

    `device` None is the GPU if there is one, otherwise the CPU.
    """
    from ..devices import compute_device

    return {
        "name": hardware_name(compute_device(device)),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def hardware_name(device: torch.device) -> str:
    """Return a name for files: the GPU's name, with their number if there are several, or the number of CPU cores."""
    from ..devices import runtime_for

    runtime = runtime_for(device)
    if runtime is None:
        return f"{device.type}-{os.cpu_count()}-cores"
    name, count = re.sub(r"[^a-z0-9]+", "-", runtime.name().lower()).strip("-"), runtime.count()
    return name if count == 1 else f"{count}x-{name}"


def versions(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of torch, Python and the installed ones of `libraries`, and the commit."""
    import torch

    found = {"torch": str(torch.__version__)}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "python": platform.python_version(), "commit": _commit()}


def _commit() -> str:
    """Return the commit of the checkout; an installed package has none."""
    root, command = Path(__file__).parent.parent, ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown (no git)"
    return result.stdout.strip() or "unknown (not a git checkout)"


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
