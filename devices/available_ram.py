"""How much RAM this process may still take: what the system has, and what its control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Controller(NamedTuple):
    """Where the memory controller is mounted, and what its files and counters are called."""

    mount: Path
    limit: str
    usage: str
    cached: tuple[str, str]
    swap_limit: str
    swap_usage: str
    swap_alone: bool
    """True if the last two are of swap alone, False if they are of RAM and swap together."""


class _Group(NamedTuple):
    """A control group with a limit: the limit and what is taken of it, which of that the kernel can still reclaim
    besides file pages, and the swap that the group may take; None: as much as the system has."""

    limit: int
    taken: int
    reclaimable: int
    swap: int | None

    @property
    def room(self) -> int:
        return max(self.limit - self.taken, 0)


V2 = _Controller(
    Path("sys/fs/cgroup"),
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file"),
    "memory.swap.max",
    "memory.swap.current",
    True,
)
V1 = _Controller(
    Path("sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.memsw.limit_in_bytes",
    "memory.memsw.usage_in_bytes",
    False,
)

ROOT = Path("/")

ESTIMATE_MARGIN = 1.1
"""An estimate of activations is 0.9 to 1.02 times what is alive at once; blocks and frames are counted exactly."""


def available_bytes(root: Path = ROOT) -> int:
    """Bytes of RAM that can be taken without swapping or being ended; cached file pages count, they make room.

    Args:
        root: where the `proc` and `sys` lie that tell about control groups.
    """
    return min([int(psutil.virtual_memory().available), *cgroup_free_bytes(root)])


def surely_lacks(nbytes: int, *, available: int | None = None, root: Path = ROOT) -> int | None:
    """The RAM that there is, where so much of it that is estimated to need `nbytes` would be ended; None otherwise.

    A refusal that was not needed is worse than one that comes late. So free swap counts too, in a control group as far
    as the group may take it, and so do caches of the kernel; and only what takes `ESTIMATE_MARGIN` times of what there
    is is sure to fail. None outside Linux: macOS and Windows enlarge their swap instead of ending a process.
    """
    if not psutil.LINUX:
        return None
    if available is None:
        swap = int(psutil.swap_memory().free)
        rooms = (
            group.room + group.reclaimable + (swap if group.swap is None else min(swap, group.swap))
            for group in _limits(root)
        )
        available = min([int(psutil.virtual_memory().available) + swap, *rooms])
    return available if nbytes > ESTIMATE_MARGIN * available else None


def cgroup_free_bytes(root: Path = ROOT) -> Iterator[int]:
    """What every control group above this process leaves it, in bytes; nothing where no group sets a limit."""
    return (group.room for group in _limits(root))


def cgroup_limits(root: Path = ROOT) -> Iterator[int]:
    """What every control group above this process may have in all, in bytes; nothing where no group sets a limit."""
    return (group.limit for group in _limits(root))


def _limits(root: Path) -> Iterator[_Group]:
    """The control groups of this process that have a limit."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield from _limits_above(root, Path(group.lstrip("/")), V1 if controllers else V2)


def _limits_above(root: Path, group: Path, names: _Controller) -> Iterator[_Group]:
    mount = root / names.mount
    # A container often sees its own group as the root of the mount, and the path of another one in `proc`.
    for folder in (mount / group, *(mount / parent for parent in group.parents)):
        try:
            limit = (folder / names.limit).read_text(encoding="ascii").strip()
            used = int((folder / names.usage).read_text(encoding="ascii"))
            counters = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:  # no such group here
            continue
        if limit != "max":
            counts = {name: int(count) for name, count in map(str.split, counters)}
            cached = sum(counts.get(name, 0) for name in names.cached)
            swap = _swap_allowance(folder, names, int(limit), used)
            yield _Group(int(limit), used - cached, counts.get("slab_reclaimable", 0), swap)


def _swap_allowance(folder: Path, names: _Controller, limit: int, used: int) -> int | None:
    """The swap that a control group may still take; None where it has no limit of it, or the kernel keeps none."""
    try:
        swap_limit = (folder / names.swap_limit).read_text(encoding="ascii").strip()
        swap_used = int((folder / names.swap_usage).read_text(encoding="ascii"))
    except OSError:  # a kernel that does not count the swap of groups
        return None
    if swap_limit == "max":
        return None
    ram = (0, 0) if names.swap_alone else (limit, used)
    return max(0, (int(swap_limit) - ram[0]) - (swap_used - ram[1]))
