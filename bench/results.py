"""Result files: figures as JSON with method, date, machine, library versions and commit.

They name no host or folder.
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

from ..schema.text import format_size

# torch takes seconds to import, and `wanstream plan` writes tables without it, so functions import
# it.
if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")
LIBRARIES = ("diffusers", "accelerate", "ray", "safetensors")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Describe device, processor, memory, system and versions for a reader."""
    import torch

    description = {
        "Device": device_name(device),
        "Processor": f"{processor_name()}, {os.cpu_count()} cores "
        f"({torch.get_num_threads()} for torch)",
        "RAM": format_size(psutil.virtual_memory().total),
        "System": f"{platform.system()} {platform.release()}",
        "Versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    if device.type != "cpu":
        for name in ("CUDA", "HIP", "XPU"):
            # Older versions of torch lack some of these.
            built_for = getattr(torch.version, name.lower(), None)
            if built_for:
                description["Versions"] += f", {name} {built_for}"
    return description


def device_name(device: torch.device) -> str:
    """Return a GPU's name and memory, like `NVIDIA RTX 4090, 25.3 GB`, or a type, like `CPU`."""
    from ..devices import runtime_for

    runtime = runtime_for(device)
    if runtime is None:
        return device.type.upper()
    return f"{runtime.name()}, {format_size(runtime.memory().total)}"


def processor_name() -> str:
    """Return the processor's model name, or its architecture."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # Linux lists no model name on 64-bit ARM.
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def hardware(device: torch.device | None = None) -> dict[str, Any]:
    """Return the machine for a result file: `name` (part of the file name), processor, cores, RAM.

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
    """Return a name for files: the GPU's name, or the CPU core count.

    The name for several GPUs has their number.
    """
    from ..devices import runtime_for

    runtime = runtime_for(device)
    if runtime is None:
        return f"{device.type}-{os.cpu_count()}-cores"
    name = re.sub(r"[^a-z0-9]+", "-", runtime.name().lower()).strip("-")
    count = runtime.count()
    return name if count == 1 else f"{count}x-{name}"


def versions(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of torch, Python and installed `libraries`, and the commit."""
    import torch

    found = {"torch": str(torch.__version__)}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "python": platform.python_version(), "commit": _commit()}


def _commit() -> str:
    """Return the checkout's commit. An installed package has none."""
    root = Path(__file__).parent.parent
    command = ["git", "rev-parse", "--show-prefix", "--short", "HEAD"]
    try:
        # Outside a checkout, git fails with an empty output, so the status is not checked.
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown (no git)"
    # In the checkout of another project, the package has a prefix.
    prefix, _, commit = result.stdout.partition("\n")
    return commit.strip() if not prefix and commit else "unknown (not a git checkout)"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement."""

    case: str
    """Measurement name, used in file names."""
    method: str
    figures: Mapping[str, Any]
    hardware: Mapping[str, Any] = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: date.today().isoformat())

    @property
    def name(self) -> str:
        """File name without suffix: `<case>_<hardware>_<yyyymmdd>`."""
        return f"{self.case}_{self.hardware['name']}_{self.date.replace('-', '')}"

    def save(self, folder: Path) -> Path:
        """Write the result into `folder`, created if necessary, and return the file path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path
