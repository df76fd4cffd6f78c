"""What the kernel counts for a process: memory, bytes from the disk, processor time."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Used up so far by one process, all its threads included."""

    read_bytes: int
    """From the disk, not from the page cache."""
    user_s: float
    system_s: float

    def since(self, before: Spent) -> Spent:
        return Spent(
            read_bytes=self.read_bytes - before.read_bytes,
            user_s=self.user_s - before.user_s,
            system_s=self.system_s - before.system_s,
        )


def spent() -> Spent:
    """By this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Spent(
        read_bytes=_fields(Path("/proc/self/io"))["read_bytes"], user_s=usage.ru_utime, system_s=usage.ru_stime
    )


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """`VmRSS`, `VmHWM` (its peak), `RssAnon` or another line of a process's status, in bytes; 0 where it has ended."""
    try:
        return 1024 * _fields(Path(f"/proc/{pid}/status")).get(field, 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


@dataclass(frozen=True, kw_only=True)
class MachineTime:
    """Seconds of processor time since the machine started."""

    busy_s: float
    stolen_s: float
    """That the host gave to other machines."""


def machine_time() -> MachineTime:
    """Of all processors together, with the time of every process."""
    ticks = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, soft_irq, stolen = ticks[:8]
    per_second = os.sysconf("SC_CLK_TCK")
    return MachineTime(busy_s=(user + nice + system + irq + soft_irq) / per_second, stolen_s=stolen / per_second)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines like "VmRSS:  123 kB"."""
    fields = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0])
    return fields
