"""What figures were measured on, in words: a number without its machine says nothing. No names of hosts or folders."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from ..plan.figure_words import size_text

CPU_INFO = Path("/proc/cpuinfo")


def surroundings(device: torch.device) -> dict[str, str]:
    """Device, processor, memory, system and versions; what this machine does not tell is left out."""
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
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {size_text(properties.total_memory)}"


def processor_name() -> str:
    """What the processor calls itself, or its architecture."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
