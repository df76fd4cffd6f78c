"""Counters of this process on Linux."""

from __future__ import annotations

from pathlib import Path


def io_bytes(counter: str) -> int:
    """Return a counter of bytes: "rchar" for all bytes read, "read_bytes" for those of disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)[counter])


def memory_bytes(field: str) -> int:
    """Return resident memory: "VmRSS" for the present one, "VmHWM" for its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])
