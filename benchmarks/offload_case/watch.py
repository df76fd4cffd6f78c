"""Run a process and sample its memory and the machine's load from outside."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .linux import machine_time, memory_bytes

SAMPLE_S = 0.05
LOG_END = 2000
"""Characters of output to keep from a failed process."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Measurements of one process, taken from outside."""

    exit_code: int
    """Exit code. A negative one is the number of the ending signal."""
    wall_s: float
    """Wall time, including interpreter start and imports."""
    anonymous_peak_bytes: int
    """Peak anonymous memory, sampled every `SAMPLE_S`. Shorter peaks may be missed."""
    others_s: float
    """Processor time used by all other processes during the run."""
    stolen_s: float
    """Processor time given by the hypervisor to other machines during the run."""
    output_end: str
    """End of a failed process's output, else empty."""

    @property
    def disturbance(self) -> float:
        """Fraction of the machine's processor time used elsewhere, from 0 to 1."""
        return (self.others_s + self.stolen_s) / (self.wall_s * (os.cpu_count() or 1))


def watch(
    command: list[str], *, log: Path, environment: Mapping[str, str], timeout_s: float
) -> Watched:
    """Run `command` until it ends, or kill it after `timeout_s`."""
    machine_before = machine_time()
    own_before = _own_cpu_s()
    start = time.perf_counter()
    anonymous = 0
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            while process.poll() is None and time.perf_counter() - start < timeout_s:
                anonymous = max(anonymous, memory_bytes("RssAnon", process.pid))
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                # This kills the process after an interrupt, too: the next run needs the machine.
                process.kill()
            process.wait()
    wall_s = time.perf_counter() - start
    machine_after = machine_time()
    busy_s = machine_after.busy_s - machine_before.busy_s
    return Watched(
        exit_code=process.returncode,
        wall_s=wall_s,
        anonymous_peak_bytes=anonymous,
        # The kernel counts the machine in ticks, so the difference may be below 0.
        others_s=max(0.0, busy_s - (_own_cpu_s() - own_before)),
        stolen_s=machine_after.stolen_s - machine_before.stolen_s,
        output_end=""
        if process.returncode == 0
        else log.read_text(encoding="utf-8", errors="replace")[-LOG_END:],
    )


def _own_cpu_s() -> float:
    """Return processor time for this process and its finished children, in seconds."""
    # Both: a finished child's time moves from its process to RUSAGE_CHILDREN.
    usages = [
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
