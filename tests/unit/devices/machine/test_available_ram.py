from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from wanstream.devices.machine.available_ram import (
    available_bytes,
    insufficient_ram,
    limited_groups,
)

HUGE = "9223372036854771712"  # cgroup version 1 writes this number for an unlimited group


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": stat,
    }


def v1(folder: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return {
        f"{place}/{name}": text
        for name, text in zip(names, (limit, f"{used}\n", stat), strict=True)
    }


CACHED_V2 = "anon 50\nfile 900\ninactive_file 100\nactive_file 200\nshmem 600\n"
CACHED_V1 = "cache 900\ninactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, [], id="no proc"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, [], id="no limit anywhere"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("a", "max", 5), [], id="v2 max"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("a", "1000", 600), [400], id="v2"),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n"} | v2("a", "1000", 600, CACHED_V2),
            [700],
            id="v2 cached files",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n"} | v2("a/b", "1000", 600) | v2("a", "900", 700),
            [400, 200],
            id="v2 parent",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n"} | v2("a", "1000", 1600), [0], id="over the limit"
        ),
        pytest.param(
            {"proc/self/cgroup": "7:blkio:/x\n4:cpu,memory:/a\n"} | v1("a", "1000", 600, CACHED_V1),
            [700],
            id="v1",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/docker/123\n0::/\n"} | v1("", "1000", 600),
            [400],
            id="v1 in a container",
        ),
    ],
)
def test_what_control_groups_leave(tmp_path, files, expected):
    assert [group.free for group in limited_groups(write(tmp_path, files))] == expected


def test_limits_are_told_whatever_of_them_is_taken(tmp_path):
    write(
        tmp_path, {"proc/self/cgroup": "0::/a/b\n"} | v2("a/b", "1000", 1600) | v2("a", "900", 700)
    )
    assert [group.limit for group in limited_groups(tmp_path)] == [1000, 900]
    assert not list(limited_groups(tmp_path / "a"))


def test_no_limit_of_version_1_is_more_than_the_system_has(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/\n"} | v1("", HUGE, 600)
    assert next(limited_groups(write(tmp_path, files))).free > psutil.virtual_memory().total


def test_this_process_can_take_something():
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_the_smallest_room_counts(tmp_path):
    write(
        tmp_path, {"proc/self/cgroup": "0::/a/b\n"} | v2("a/b", "9000", 600) | v2("a", "900", 700)
    )
    assert available_bytes(tmp_path) == 200


def test_only_what_surely_fails_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6_000_000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=4_000_000))
    assert insufficient_ram(11_000_000, root=tmp_path) is None
    assert insufficient_ram(11_000_001, root=tmp_path) == 10_000_000
    files = {"proc/self/cgroup": "0::/a\n", **v2("a", "5000000", 4_000_000), **swap_v2("a", "0", 0)}
    groups = write(tmp_path, files)
    assert insufficient_ram(1_100_000, root=groups) is None
    assert insufficient_ram(1_100_001, root=groups) == 1_000_000, (
        "a control group leaves less than the system has"
    )
    assert insufficient_ram(3, available=2) == 2


def swap_v2(folder: str, limit: str, used: int) -> dict[str, str]:
    place = f"sys/fs/cgroup/{folder}"
    return {f"{place}/memory.swap.max": f"{limit}\n", f"{place}/memory.swap.current": f"{used}\n"}


def swap_v1(folder: str, limit: str, used: int) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{folder}/memory.memsw"
    return {f"{place}.limit_in_bytes": f"{limit}\n", f"{place}.usage_in_bytes": f"{used}\n"}


OF_V2 = {
    "proc/self/cgroup": "0::/a\n",
    **v2("a", "1000", 600, "slab_reclaimable 50\nslab_unreclaimable 7\n"),
}
OF_V1 = {"proc/self/cgroup": "4:memory:/a\n", **v1("a", "1000", 600)}


@pytest.mark.parametrize(
    ("files", "room"),
    [
        pytest.param(OF_V2 | swap_v2("a", "300", 100), 400 + 50 + 200, id="v2"),
        pytest.param(OF_V2 | swap_v2("a", "300", 400), 400 + 50, id="v2, over the limit of swap"),
        pytest.param(OF_V2 | swap_v2("a", "max", 100), 400 + 50 + 5000, id="v2, all of the swap"),
        pytest.param(OF_V2, 400 + 50 + 5000, id="v2 does not count swap"),
        pytest.param(OF_V1 | swap_v1("a", "1300", 700), 400 + 200, id="v1"),
        pytest.param(OF_V1 | swap_v1("a", HUGE, 700), 400 + 5000, id="v1, no limit of both"),
        pytest.param(OF_V1, 400 + 5000, id="v1 does not count swap"),
    ],
)
def test_a_group_may_swap_what_it_is_allowed_before_anything_is_refused(
    tmp_path, monkeypatch, files, room
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=5000))
    write(tmp_path, files)
    assert insufficient_ram(int(1.1 * room), root=tmp_path) is None
    assert insufficient_ram(int(1.1 * room) + 2, root=tmp_path) == room
    assert available_bytes(tmp_path) == 400, "what can be taken without swapping"


def test_nothing_surely_fails_where_the_system_enlarges_its_swap(monkeypatch):
    assert insufficient_ram(10**18) is not None
    monkeypatch.setattr(psutil, "LINUX", False)
    assert insufficient_ram(10**18) is None
    assert insufficient_ram(3, available=2) is None
