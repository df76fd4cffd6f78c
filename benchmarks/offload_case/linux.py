"""Linux kernel interfaces for the case: process counters, the page cache, memory control groups.

The /proc counters and the page cache calls exist on Linux only, as does the whole case.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
REMOVAL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Resources used so far by one process, including all threads."""

    read_bytes: int
    """Bytes from the disk, not from the page cache."""
    user_s: float
    system_s: float

    def since(self, before: ProcessUsage) -> ProcessUsage:
        """Return the difference from an earlier reading."""
        return ProcessUsage(
            read_bytes=self.read_bytes - before.read_bytes,
            user_s=self.user_s - before.user_s,
            system_s=self.system_s - before.system_s,
        )


def process_usage() -> ProcessUsage:
    """Return the resources used by this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUsage(
        read_bytes=_numbers(Path("/proc/self/io"))["read_bytes"],
        user_s=usage.ru_utime,
        system_s=usage.ru_stime,
    )


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """Return `VmRSS`, `VmHWM` (the peak), `RssAnon` or another line in a process's status.

    0 after its end.
    """
    try:
        return 1024 * _numbers(Path(f"/proc/{pid}/status")).get(field, 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


@dataclass(frozen=True, kw_only=True)
class MachineTime:
    """Seconds of processor time since machine start, summed over processors and processes."""

    busy_s: float
    stolen_s: float
    """Time given by the hypervisor to other machines."""


def machine_time() -> MachineTime:
    """Read the processor time of the whole machine."""
    ticks = [
        int(value)
        for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ]
    # The next columns are guest time, and user time includes guest time already.
    user, nice, system, _idle, _iowait, irq, soft_irq, stolen = ticks[:8]
    per_second = os.sysconf("SC_CLK_TCK")
    return MachineTime(
        busy_s=(user + nice + system + irq + soft_irq) / per_second, stolen_s=stolen / per_second
    )


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file with lines like "VmRSS:  123 kB", by name."""
    numbers = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            numbers[name] = int(number[0])
    return numbers


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache, except pages mapped by another process."""
    for file in files:
        with file.open("rb") as opened:
            # Dirty pages cannot be dropped, so they are written first.
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of these files in the page cache."""
    return sum(_cached_pages(file) for file in files) * mmap.PAGESIZE


def _cached_pages(file: Path) -> int:
    size = file.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with (
        file.open("rb") as opened,
        # `from_buffer` needs a writable mapping, and a private one cannot change the file.
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
    ):
        start = (ctypes.c_char * size).from_buffer(mapped)
        states = (ctypes.c_ubyte * pages)()
        failed = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states
        )
        del start  # a mapping with an exported buffer cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        return len(states) - bytes(states).count(0)


class NoMemoryLimitError(OSError):
    """No control group with a memory limit is available. The message has a reason and a remedy."""


@dataclass(frozen=True, kw_only=True)
class LimitedGroup:
    """Control group whose processes cannot use more than the limit, including page cache."""

    folder: Path
    limit_bytes: int
    peak_file: str
    kills_file: str

    def command(self, command: list[str]) -> list[str]:
        """Wrap a command so that it runs inside the group from the first instruction on."""
        joined = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", joined, str(self.folder / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        """Group's peak memory. The page cache always fills the rest of the limit."""
        return int((self.folder / self.peak_file).read_text(encoding="ascii"))

    @property
    def kills(self) -> int:
        """Number of processes killed because the group was full."""
        lines = (self.folder / self.kills_file).read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """Create a control group with a memory limit (cgroup v1 or v2), and remove it afterwards.

    Raises:
        NoMemoryLimitError: the system has no memory control groups, or they cannot be created here.
    """
    parent, unified = _current_group()
    folder = parent / f"wanstream-benchmark-{os.getpid()}"
    try:
        if (
            unified
            and "memory"
            not in (parent / "cgroup.subtree_control").read_text(encoding="ascii").split()
        ):
            # In version 2, children have only the controllers that the parent passes on.
            (parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        folder.mkdir()
    except OSError as err:
        raise NoMemoryLimitError(
            f"no group with a memory limit can be made in {parent} ({err.strerror}): run as root, "
            "or inside a group that is yours (systemd-run --user --scope -p Delegate=yes ...)"
        ) from err
    try:
        (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(
            str(limit_bytes), encoding="ascii"
        )
        yield LimitedGroup(
            folder=folder,
            limit_bytes=limit_bytes,
            # Linux has `memory.peak` from 5.19 on.
            peak_file="memory.peak" if unified else "memory.max_usage_in_bytes",
            kills_file="memory.events" if unified else "memory.oom_control",
        )
    finally:
        _remove(folder)


def _current_group() -> tuple[Path, bool]:
    """Return the folder of this process's memory group, and True for cgroup v2."""
    mounts = [
        line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    ]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, place, kind, options, *_ in mounts:
            folder = Path(place) / path.lstrip("/")
            # Version 1 has a mount for each controller. A machine may have both versions.
            if kind == "cgroup" and controllers == "memory" and "memory" in options.split(","):
                return folder, False
            if kind == "cgroup2" and not controllers and _controls_memory(folder):
                return folder, True
    raise NoMemoryLimitError(
        "this system has no memory control groups: nothing can be run inside a memory limit here"
    )


def _controls_memory(folder: Path) -> bool:
    listed = folder / "cgroup.controllers"
    return listed.exists() and "memory" in listed.read_text(encoding="ascii").split()


def _remove(folder: Path) -> None:
    """Remove a group. The kernel allows this only a moment after its last process has ended."""
    until = time.monotonic() + REMOVAL_TIMEOUT_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:  # busy until the kernel has cleaned up the processes
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
