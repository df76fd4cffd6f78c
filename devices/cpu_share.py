"""CPUs for this process, and a notice if torch computes with more threads."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from .machine.available_ram import ROOT, group_folders
from .registry import core_count

logger = logging.getLogger("wanstream.devices")

_logged = threading.Event()


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """Yield the CPU count for every control group with a quota around this process.

    Args:
        root: folder with the `proc` and `sys` file systems that describe the control groups.
    """
    for folder, is_v2 in group_folders("cpu", root):
        try:
            if is_v2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:  # no such group here
            continue
        # Without a limit, the file has "max" in version 2, and -1 in version 1.
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def cpu_load(root: Path = ROOT) -> float | None:
    """Return the mean number of processes running or waiting for a CPU in the last minute.

    None if unknown. Linux also counts processes waiting for a disk, and readers would look like
    other programs. Where the kernel measures waits for CPUs, the load counts only if some process
    waited for half of the minute.
    """
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    with suppress(OSError):  # not Linux, or a kernel without it
        text = (root / "proc/pressure/cpu").read_text(encoding="ascii")
        waited = re.search(r"avg60=(\S+)", text)
        if waited and float(waited[1]) < 50:
            return None
    return os.getloadavg()[0]


def thread_notice(threads: int, cpus: float, *, all_cpus: int, load: float | None) -> str:
    """Return a notice if torch threads wait for each other because they share CPUs, else "".

    They wait by spinning: on two busy cores, two threads took 12 to 24 times as long as one in
    small products.

    Args:
        cpus: CPUs for this process.
        all_cpus: CPUs in the machine.
        load: see `cpu_load`.
    """
    # A quota of 1.5 CPUs permits two threads. With more threads than that, one is proposed.
    best = max(1, math.floor(cpus)) if threads > max(1, math.ceil(cpus)) else threads
    reason = f"{threads} threads of torch share {cpus:.3g} CPUs"
    # The load covers the whole machine, including threads from an earlier run in this process. It
    # says nothing about a part.
    if threads > 1 and load is not None and cpus >= all_cpus and load - threads >= all_cpus:
        best = 1
        reason += f" with other programs (load {load:.1f})"
    if best == threads:
        return ""
    return (
        f"{reason}: set OMP_NUM_THREADS={best} before the program starts, else steps may take many "
        "times longer"
    )


def thread_notes(device: torch.device) -> list[str]:
    """Return the notice from `thread_notice` for a run on this device.

    Logs the first one in this process.
    """
    if device.type != "cpu":
        return []
    cpus = min([core_count(), *cpu_quotas()])
    notice = thread_notice(
        torch.get_num_threads(), cpus, all_cpus=os.cpu_count() or 1, load=cpu_load()
    )
    if not notice:
        return []
    if not _logged.is_set():
        _logged.set()
        logger.warning("%s", notice)
    return [notice]
