"""RAM this process can still allocate: available in the system, limited by control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Controller(NamedTuple):
    """Memory controller file and counter names."""

    limit: str
    usage: str
    cached: tuple[str, str]
    swap_limit: str
    swap_usage: str
    swap_only: bool
    """True if `swap_limit` and `swap_usage` count swap only, False if they count RAM and swap
    together."""


class MemoryGroup(NamedTuple):
    """Control group with a memory limit. All values are in bytes."""

    limit: int
    used: int
    """Memory in use, without cached file pages. The kernel can reclaim these."""
    reclaimable: int
    """Part of `used` in reclaimable kernel caches."""
    swap: int | None
    """Swap the group may still use. None without a swap limit."""

    @property
    def free(self) -> int:
        return max(self.limit - self.used, 0)


V2 = _Controller(
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file"),
    "memory.swap.max",
    "memory.swap.current",
    True,
)
V1 = _Controller(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.memsw.limit_in_bytes",
    "memory.memsw.usage_in_bytes",
    False,
)

ROOT = Path("/")

ESTIMATE_MARGIN = 1.1
"""Activation estimates are 0.9 to 1.02 times the true peak. Blocks and frames are counted
exactly."""


def available_bytes(root: Path = ROOT) -> int:
    """Return the RAM in bytes that can be allocated without swapping or being killed.

    Cached file pages count as available, because the kernel reclaims them.

    Args:
        root: folder with the `proc` and `sys` file systems that describe the control groups.
    """
    groups = limited_groups(root)
    return min([int(psutil.virtual_memory().available), *(group.free for group in groups)])


def insufficient_ram(nbytes: int, *, available: int | None = None, root: Path = ROOT) -> int | None:
    """Return the available bytes if `nbytes` more would get a process killed, else None.

    `nbytes` is an estimate, and a needless refusal is worse than a late one. Free swap and
    reclaimable kernel caches therefore count as available, within the control group limits, and
    `nbytes` must exceed `ESTIMATE_MARGIN` times the available bytes. Always None outside Linux:
    macOS and Windows enlarge their swap instead of killing a process.
    """
    if not psutil.LINUX:
        return None
    if available is None:
        swap = int(psutil.swap_memory().free)
        in_groups = (
            group.free + group.reclaimable + (swap if group.swap is None else min(swap, group.swap))
            for group in limited_groups(root)
        )
        available = min([int(psutil.virtual_memory().available) + swap, *in_groups])
    return available if nbytes > ESTIMATE_MARGIN * available else None


def limited_groups(root: Path = ROOT) -> Iterator[MemoryGroup]:
    """Yield this process's control groups with a memory limit."""
    for folder, is_v2 in group_folders("memory", root):
        names = V2 if is_v2 else V1
        try:
            limit = (folder / names.limit).read_text(encoding="ascii").strip()
            used = int((folder / names.usage).read_text(encoding="ascii"))
            counters = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:  # no such group here
            continue
        # Only version 2 writes "max". Version 1 writes a huge number, and such a limit is harmless.
        if limit != "max":
            counts = {name: int(count) for name, count in map(str.split, counters)}
            cached = sum(counts.get(name, 0) for name in names.cached)
            swap = _swap_allowance(folder, names, int(limit), used)
            yield MemoryGroup(int(limit), used - cached, counts.get("slab_reclaimable", 0), swap)


def group_folders(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, bool]]:
    """Yield a folder for each control group with this controller around this process.

    The second value is True for version 2. In a container the mount often starts at the container's
    own group, but `proc` has the path on the host. All parents are tried, so some folders do not
    exist.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in groups:
        # Version 2 lists no controllers, as in `0::/path`. A path may contain colons.
        _, controllers, name = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = Path(name.lstrip("/"))
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            for folder in (mount / group, *(mount / parent for parent in group.parents)):
                yield folder, not controllers


def _swap_allowance(folder: Path, names: _Controller, limit: int, used: int) -> int | None:
    """Return the swap a control group may still use.

    None without a limit, or if the kernel does not count swap.
    """
    try:
        swap_limit = (folder / names.swap_limit).read_text(encoding="ascii").strip()
        swap_used = int((folder / names.swap_usage).read_text(encoding="ascii"))
    except OSError:  # a kernel that does not count the swap of groups
        return None
    if swap_limit == "max":
        return None
    # Version 1 limits RAM and swap together: without the RAM, the swap remains.
    ram = (0, 0) if names.swap_only else (limit, used)
    return max(0, (int(swap_limit) - ram[0]) - (swap_used - ram[1]))
