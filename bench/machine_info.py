"""Machine, libraries and commit that figures were measured on. No names of hosts or folders."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..schema import size_text

# torch takes seconds to import, and `wanstream plan` writes its tables without it: functions import it.
if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")
LIBRARIES = ("diffusers", "accelerate", "ray", "safetensors")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Device, processor, memory, system and versions for a reader."""
    import torch

    words = {
        "Device": device_name(device),
        "Processor": f"{processor_name()}, {os.cpu_count()} cores ({torch.get_num_threads()} for torch)",
        "RAM": size_text(psutil.virtual_memory().total),
        "System": f"{platform.system()} {platform.release()}",
        "Versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    if device.type == "cuda":
        words["Versions"] += f", CUDA {torch.version.cuda}"
    return words


def device_name(device: torch.device) -> str:
    """`NVIDIA RTX 4090, 25.3 GB` and the like; a CPU is just that."""
    import torch

    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {size_text(properties.total_memory)}"


def processor_name() -> str:
    """The processor's name for itself, or its architecture."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def hardware(device: torch.device) -> dict[str, Any]:
    """Machine of a result file: `name` for its file name, processor, cores and RAM."""
    return {
        "name": hardware_name(device),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def hardware_name(device: torch.device) -> str:
    """The GPUs' number, from two on, and name, or the number of CPU cores, in a form that suits a file name."""
    import torch

    if device.type != "cuda":
        return f"cpu-{os.cpu_count()}-cores"
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    count = torch.cuda.device_count()
    return name if count == 1 else f"{count}x-{name}"


def versions(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """torch, Python, the commit, and those of `libraries` that are installed."""
    import torch

    found = {"torch": str(torch.__version__)}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "python": platform.python_version(), "commit": _commit()}


def _commit() -> str:
    """The checkout's commit; an installed package, and files copied without their history, have none."""
    root, command = Path(__file__).parent.parent, ["git", "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown (no git)"
    return answer.stdout.strip() or "unknown (not a git checkout)"
