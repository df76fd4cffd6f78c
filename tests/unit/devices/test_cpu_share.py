"""CPUs for this process under control group quotas, and the notice about too many threads."""

from __future__ import annotations

import threading

import pytest
import torch

from wanstream.devices import cpu_share
from wanstream.devices.cpu_share import cpu_load, cpu_quotas, thread_notes, thread_notice


def v1(quota: int) -> dict[str, str]:
    return {"cpu/a/cpu.cfs_quota_us": f"{quota}\n", "cpu/a/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("group", "files", "quotas"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, [2.0]),
        ("0::/host/path", {"cpu.max": "50000 100000\n"}, [0.5]),
        ("3:cpu,cpuacct:/a\n2:memory:/b", v1(150000), [1.5]),
        ("3:cpu,cpuacct:/a", v1(-1), []),
        ("0::/", {}, []),
        (None, {}, []),
    ],
    ids=["v2", "container", "v1", "v1 without", "v2 without", "not Linux"],
)
def test_a_quota_is_that_of_the_group_or_a_parent(tmp_path, group, files, quotas):
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if group is not None:
        written["proc/self/cgroup"] = group
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert list(cpu_quotas(tmp_path)) == quotas


REMEDIES = [(1, 0.5, 50.0, None), (2, 2, None, None), (2, 1.5, None, None), (4, 2.5, None, 2)]
REMEDIES += [(32, 0.5, 0.0, 1), (2, 2, 3.9, None), (2, 2, 10.0, 1), (8, 8, 15.9, None)]


@pytest.mark.parametrize(("threads", "cpus", "load", "remedy"), REMEDIES)
def test_threads_that_share_cpus_are_noticed(threads, cpus, load, remedy):
    notice = thread_notice(threads, cpus, all_cpus=max(1, int(cpus)), load=load)
    if remedy is None:
        assert notice == ""
    else:
        assert f"{threads} threads" in notice
        assert f"OMP_NUM_THREADS={remedy} " in notice[:120]


@pytest.mark.parametrize("threads", [2, 4])
def test_a_machines_load_says_nothing_about_some_of_its_cpus(threads):
    assert thread_notice(threads, 4, all_cpus=64, load=70.0) == ""


@pytest.mark.parametrize(("waited", "load"), [(None, 70.0), ("49.99", None), ("50.00", 70.0)])
def test_processes_that_wait_for_a_disk_are_no_load(monkeypatch, tmp_path, waited, load):
    monkeypatch.setattr("os.getloadavg", lambda: (70.0, 60.0, 50.0))
    if waited is not None:
        (tmp_path / "proc/pressure").mkdir(parents=True)
        text = f"some avg10=99.00 avg60={waited} avg300=0.00 total=1\nfull avg10=0 avg60=0.00\n"
        (tmp_path / "proc/pressure/cpu").write_text(text, encoding="ascii")
    assert cpu_load(tmp_path) == load


def test_every_run_has_the_notice_and_the_log_has_it_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu_share, "cpu_quotas", lambda: iter([0.25]))
    monkeypatch.setattr(cpu_share, "_logged", threading.Event())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):
        (notice,) = thread_notes(torch.device("cpu"))
        assert "share 0.25 CPUs" in notice
    assert len(caplog.records) == 1
    assert thread_notes(torch.device("meta")) == []
