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


V2 = _Controller(Path("sys/fs/cgroup"), "memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = _Controller(
    Path("sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)

ROOT = Path("/")

ESTIMATE_MARGIN = 1.1
"""An estimate of activations is 0.9 to 1.02 times what is alive at once; blocks and frames are counted exactly."""


def available_bytes(root: Path = ROOT) -> int:
    """Bytes of RAM that can be taken without swapping or being ended; cached file pages count, they make room.

    Args:
        root: where the `proc` and `sys` lie that tell about control groups.
    """
    return min([int(psutil.virtual_memory().available), *cgroup_rooms(root)])


def surely_lacks(nbytes: int, *, available: int | None = None, root: Path = ROOT) -> int | None:
    """The RAM that there is, where so much of it that is estimated to need `nbytes` would be ended; None otherwise.

    A refusal that was not needed is worse than one that comes late. So free swap counts too, but in a control group
    with a limit, and only what takes `ESTIMATE_MARGIN` times of what there is is sure to fail.
    """
    if available is None:
        rooms = [*cgroup_rooms(root)]
        available = min([int(psutil.virtual_memory().available) + int(psutil.swap_memory().free), *rooms])
    return available if nbytes > ESTIMATE_MARGIN * available else None


def cgroup_rooms(root: Path = ROOT) -> Iterator[int]:
    """What every control group above this process leaves it, in bytes; nothing where no group sets a limit."""
    return (max(limit - taken, 0) for limit, taken in _limits(root))


def cgroup_limits(root: Path = ROOT) -> Iterator[int]:
    """What every control group above this process may have in all, in bytes; nothing where no group sets a limit."""
    return (limit for limit, _ in _limits(root))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group, and what of it is taken."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield from _limits_above(root, Path(group.lstrip("/")), V1 if controllers else V2)


def _limits_above(root: Path, group: Path, names: _Controller) -> Iterator[tuple[int, int]]:
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
            cached = sum(int(count) for name, count in map(str.split, counters) if name in names.cached)
            yield int(limit), used - cached
