"""Runs a process and looks at it from outside: anonymous memory, and what else the machine did meanwhile."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .process_figures import machine_time, memory_bytes

SAMPLE_S = 0.05
LOG_END = 2000  # characters of its output that are kept of a process that failed


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One process, seen from outside."""

    exit_code: int
    """Negative: the signal that ended it."""
    wall_s: float
    """With the start of the interpreter and the imports."""
    anonymous_peak_bytes: int
    """Peak of memory that is no file's; sampled, so a shorter peak may be missed."""
    others_s: float
    """Processor time that all other processes took meanwhile."""
    stolen_s: float
    """Processor time that the host gave to other machines meanwhile."""
    output_end: str
    """The end of what it wrote, where it failed."""

    @property
    def disturbance(self) -> float:
        """The part of the machine's processor time that went elsewhere, 0 to 1."""
        return (self.others_s + self.stolen_s) / (self.wall_s * (os.cpu_count() or 1))


def watch(command: list[str], *, log: Path, environment: Mapping[str, str], timeout_s: float) -> Watched:
    """Run `command` to its end, or to the end of its time."""
    machine_before, taken_before, began = machine_time(), _ours(), time.perf_counter()
    anonymous = 0
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            while process.poll() is None and time.perf_counter() - began < timeout_s:
                anonymous = max(anonymous, memory_bytes("RssAnon", process.pid))
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wall_s, machine_after = time.perf_counter() - began, machine_time()
    busy_s = machine_after.busy_s - machine_before.busy_s
    return Watched(
        exit_code=process.returncode,
        wall_s=wall_s,
        anonymous_peak_bytes=anonymous,
        others_s=max(0.0, busy_s - (_ours() - taken_before)),
        stolen_s=machine_after.stolen_s - machine_before.stolen_s,
        output_end="" if process.returncode == 0 else log.read_text(encoding="utf-8", errors="replace")[-LOG_END:],
    )


def _ours() -> float:
    """Processor time of this process and of all that it has waited for."""
    usages = [resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
