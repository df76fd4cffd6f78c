"""A memory limit for one process: a group of its own below ours, made for the run and removed after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REMOVAL_S = 10.0


class NoMemoryLimitError(OSError):
    """The machine gives us no group with a limit; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class LimitedGroup:
    """A group whose processes may hold no more than its limit, page cache included."""

    folder: Path
    limit_bytes: int
    peak_file: str
    kills_file: str

    def command(self, command: list[str]) -> list[str]:
        """The same command, inside the group from its first instruction on."""
        joined = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", joined, str(self.folder / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        """The most that the group held; the page cache always fills what is left."""
        return int((self.folder / self.peak_file).read_text(encoding="ascii"))

    @property
    def kills(self) -> int:
        """Processes that were killed because the group was full."""
        lines = (self.folder / self.kills_file).read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A fresh group, with either version of the kernel's interface.

    Raises:
        NoMemoryLimitError: there is none, or we may not make one.
    """
    parent, unified = _own_group()
    folder = parent / f"wanstream-benchmark-{os.getpid()}"
    try:
        if unified and "memory" not in (parent / "cgroup.subtree_control").read_text(encoding="ascii").split():
            (parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        folder.mkdir()
    except OSError as err:
        raise NoMemoryLimitError(
            f"no group with a memory limit can be made in {parent} ({err.strerror}): run as root, or inside a group "
            "that is yours (systemd-run --user --scope -p Delegate=yes ...)"
        ) from err
    try:
        (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit_bytes), encoding="ascii")
        yield LimitedGroup(
            folder=folder,
            limit_bytes=limit_bytes,
            peak_file="memory.peak" if unified else "memory.max_usage_in_bytes",
            kills_file="memory.events" if unified else "memory.oom_control",
        )
    finally:
        _remove(folder)


def _own_group() -> tuple[Path, bool]:
    """The folder of our own memory group, and whether it is of the unified kind (version 2)."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, place, kind, options, *_ in mounts:
            folder = Path(place) / path.lstrip("/")
            if kind == "cgroup" and controllers == "memory" and "memory" in options.split(","):
                return folder, False
            if kind == "cgroup2" and not controllers and _controls_memory(folder):
                return folder, True
    raise NoMemoryLimitError("this system has no memory control groups: nothing can be run inside a memory limit here")


def _controls_memory(folder: Path) -> bool:
    listed = folder / "cgroup.controllers"
    return listed.exists() and "memory" in listed.read_text(encoding="ascii").split()


def _remove(folder: Path) -> None:
    """A group can be removed a moment after its last process has ended, not at once."""
    until = time.monotonic() + REMOVAL_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
