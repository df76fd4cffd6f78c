"""RAM that this process can take, under control groups and with swap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from wanstream.devices.machine import available_bytes, insufficient_ram, limited_groups

HUGE = 9223372036854771712  # cgroup version 1 writes this number for an unlimited group
Files = dict[str, object]


@pytest.fixture
def write(tmp_path) -> Callable[[Files], Path]:
    """Write files of the system, and return its root."""

    def write(files: Files) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n" if text != "" else "")
        return tmp_path

    return write


def group(*lines: str) -> Files:
    return {"proc/self/cgroup": "\n".join(lines)}


def v2(folder: str, limit: object, used: int, stat: str = "") -> Files:
    place = f"sys/fs/cgroup/{folder}/memory"
    return {f"{place}.max": limit, f"{place}.current": used, f"{place}.stat": stat}


def v1(folder: str, limit: int, used: int, stat: str = "") -> Files:
    place = f"sys/fs/cgroup/memory/{folder}/memory".replace("//", "/")
    bytes_of = {f"{place}.limit_in_bytes": limit, f"{place}.usage_in_bytes": used}
    return bytes_of | {f"{place}.stat": stat}


def swap_v2(limit: object, used: int) -> Files:
    place = "sys/fs/cgroup/a/memory.swap"
    return {f"{place}.max": limit, f"{place}.current": used}


def swap_v1(limit: int, used: int) -> Files:
    place = "sys/fs/cgroup/memory/a/memory.memsw"
    return {f"{place}.limit_in_bytes": limit, f"{place}.usage_in_bytes": used}


CACHED_V2 = "anon 50\nfile 900\ninactive_file 100\nactive_file 200\nshmem 600"
CACHED_V1 = "cache 900\ninactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200"
IN_A = group("0::/a")
IN_B = group("0::/a/b")
IN_DOCKER = group("4:memory:/docker/123", "0::/")
V1 = group("7:blkio:/x", "4:cpu,memory:/a")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, [], id="no proc"),
        pytest.param(group("0::/"), [], id="no limit anywhere"),
        pytest.param(IN_A | v2("a", "max", 5), [], id="v2 max"),
        pytest.param(IN_A | v2("a", 1000, 600, CACHED_V2), [700], id="v2 cached files"),
        pytest.param(IN_B | v2("a/b", 1000, 600) | v2("a", 900, 700), [400, 200], id="v2 parent"),
        pytest.param(IN_A | v2("a", 1000, 1600), [0], id="over the limit"),
        pytest.param(V1 | v1("a", 1000, 600, CACHED_V1), [700], id="v1"),
        pytest.param(IN_DOCKER | v1("", 1000, 600), [400], id="v1 in a container"),
    ],
)
def test_free_memory_in_control_groups(write, files, expected):
    root = write(files)
    assert [group.free for group in limited_groups(root)] == expected
    whole = psutil.virtual_memory().available
    assert available_bytes(root) == pytest.approx(min([whole, *expected]), rel=0.5)
    assert not list(limited_groups(root / "a"))


def test_limits_do_not_depend_on_use(write):
    root = write(IN_B | v2("a/b", 1000, 1600) | v2("a", 900, 700))
    assert [group.limit for group in limited_groups(root)] == [1000, 900]
    unlimited = write(group("4:memory:/") | v1("", HUGE, 600))
    assert next(limited_groups(unlimited)).free > psutil.virtual_memory().total
    assert 0 < available_bytes() <= psutil.virtual_memory().total


@pytest.fixture
def system(monkeypatch):
    def pretend(available: int, swap: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap))

    return pretend


def test_only_certain_failures_are_refused(write, tmp_path, system):
    system(6_000_000, 4_000_000)
    assert insufficient_ram(11_000_000, root=tmp_path) is None
    assert insufficient_ram(11_000_001, root=tmp_path) == 10_000_000
    root = write(IN_A | v2("a", 5_000_000, 4_000_000) | swap_v2(0, 0))
    assert insufficient_ram(1_100_000, root=root) is None
    assert insufficient_ram(1_100_001, root=root) == 1_000_000, "less than the system has"
    assert insufficient_ram(3, available=2) == 2


OF_V2 = IN_A | v2("a", 1000, 600, "slab_reclaimable 50\nslab_unreclaimable 7")
OF_V1 = group("4:memory:/a") | v1("a", 1000, 600)


@pytest.mark.parametrize(
    ("files", "room"),
    [
        pytest.param(OF_V2 | swap_v2(300, 100), 400 + 50 + 200, id="v2"),
        pytest.param(OF_V2 | swap_v2(300, 400), 400 + 50, id="v2, over the limit of swap"),
        pytest.param(OF_V2 | swap_v2("max", 100), 400 + 50 + 5000, id="v2, all of the swap"),
        pytest.param(OF_V2, 400 + 50 + 5000, id="v2 does not count swap"),
        pytest.param(OF_V1 | swap_v1(1300, 700), 400 + 200, id="v1"),
        pytest.param(OF_V1 | swap_v1(HUGE, 700), 400 + 5000, id="v1, no limit of both"),
        pytest.param(OF_V1, 400 + 5000, id="v1 does not count swap"),
    ],
)
def test_a_group_may_swap_before_anything_is_refused(write, system, files, room):
    system(1_000_000, 5000)
    root = write(files)
    assert insufficient_ram(int(1.1 * room), root=root) is None
    assert insufficient_ram(int(1.1 * room) + 2, root=root) == room
    assert available_bytes(root) == 400, "without swapping"


def test_nothing_is_refused_where_the_system_enlarges_its_swap(monkeypatch):
    assert insufficient_ram(10**18) is not None
    monkeypatch.setattr(psutil, "LINUX", False)
    assert insufficient_ram(10**18) is None
    assert insufficient_ram(3, available=2) is None
