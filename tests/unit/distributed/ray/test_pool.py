"""Messages about a worker lost behind a fake Ray, the worker's end, and the version check."""

import platform
import shutil
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from wanstream.distributed.messages import WorkerFacts
from wanstream.distributed.ray import pool as ray_pool
from wanstream.distributed.ray.actor import FOLDER, Started
from wanstream.distributed.ray.connection import CONNECTION
from wanstream.distributed.worker.worker import Worker
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.schema.version import VERSION

HERE = "this machine"
CLUSTER = "127.0.0.1:6379"


@pytest.fixture
def lose(monkeypatch):
    """`lose(address, logs, node=HERE)` returns the message about a worker with such logs."""

    def message(address: str, logs: tuple[str, ...], node: str = HERE) -> str:
        monkeypatch.setattr(CONNECTION, "address", address)
        return str(worker(logs, node).call("facts").exception(0)).partition("is gone: ")[2]

    return message


def worker(logs=(), node=HERE):
    facts = replace(Worker("cpu", machine=node).facts(), node=node)
    started = Started(facts=facts, logs=logs, requires_token=False, process="p")
    context = SimpleNamespace(get_node_id=lambda: HERE)
    ray = SimpleNamespace(is_initialized=lambda: False, get_runtime_context=lambda: context)
    return ray_pool.RayWorkerHandle(ray, {}, None, 0, started)


def test_the_end_of_a_log_is_shown_and_its_path_only_if_it_stays(lose, tmp_path):
    log, empty, gone = (tmp_path / name for name in ("worker.out", "worker.err", "not here"))
    lines = [f"line {number}" for number in range(100)]
    text = "\n".join([":job_id:01", *lines, ":actor_name:X", "out of memory"])
    log.write_bytes(text.encode() + b"\xff\n")
    shown = "\n".join([*lines[71:], "out of memory\N{REPLACEMENT CHARACTER}"])
    empty.touch()
    logs = (str(log), str(empty))
    ended = "it was ended from here"
    assert lose("local", logs) == f"{ended}\nThe end of its log:\n{shown}"
    named = f"The end of its log ({log} and {empty}):\n{shown}"
    assert lose(CLUSTER, logs) == f"{ended}\n{named}"
    assert lose("local", (str(empty),)) == lose(CLUSTER, (str(empty),)) == ended
    # On another machine.
    assert lose(CLUSTER, (str(gone),), "node-b") == f"{ended}; its log on node-b is {gone}"
    assert lose("local", (str(gone),)) == ended, "our Ray has removed it"


@pytest.mark.parametrize(
    ("server", "is_alive", "has_ray"),
    [(CLUSTER, True, True), (CLUSTER, False, False), ("10.0.0.5:6379", False, True)],
)
def test_a_server_on_another_machine_may_be_cut_off_for_a_moment(
    monkeypatch, server, is_alive, has_ray
):
    monkeypatch.setattr(CONNECTION, "is_alive", lambda: is_alive)
    monkeypatch.setattr(CONNECTION, "_server", server)
    assert worker().has_ray() == has_ray


LIMIT_S = 120
STORE_BYTES = 128 << 20

_PACKAGES = {"WanStream": "0.1.0", "torch": "2.13.0+cu130", "diffusers": "0.39.0"}
VERSIONS = {**_PACKAGES, "Python": "3.11.7"}
DRIVER = WorkerFacts(pid=1, node="desk", address="127.0.0.1", device="cpu", versions=VERSIONS)


def a_worker(node: str = "rack", **versions: str) -> WorkerFacts:
    return replace(DRIVER, node=node, versions={**VERSIONS, **versions})


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.13.1"),
        ("torch", "2.13.0+cpu"),
        ("diffusers", "0.39.0.dev0"),
        ("Python", "3.11"),
    ],
)
def test_what_differs_behind_the_second_number_fits(name, version):
    ray_pool.check_versions(VERSIONS, [DRIVER, a_worker(**{name: version})])


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *(("WanStream", "0.1.1"), ("torch", "2.12.0+cu130"), ("torch", "3.13.0")),
        *(("diffusers", "0.38.0"), ("diffusers", "0.390.0"), ("Python", "3.12.1")),
    ],
)
def test_other_versions_are_refused_by_name(name, version, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "desk")
    with pytest.raises(ray_pool.VersionsError) as refused:
        ray_pool.check_versions(VERSIONS, [DRIVER, a_worker(**{name: version})])
    driver = f"the driver on desk has {name} {VERSIONS[name]}"
    assert f"worker 1 on rack has {name} {version}, {driver}" in str(refused.value)
    assert "install the same versions" in str(refused.value)


def test_every_difference_is_told():
    other = a_worker(torch="main", diffusers="0.36.0")
    with pytest.raises(ray_pool.VersionsError) as refused:
        ray_pool.check_versions(VERSIONS, [other, DRIVER, other])
    told = str(refused.value)
    assert [told.count(f"worker {rank}") for rank in range(3)] == [2, 0, 2]


@pytest.mark.slow
def test_worker_with_another_wanstream_is_refused(tmp_path):
    """The worker's code comes from the path map, as on another machine."""
    pytest.importorskip("ray")
    there = tmp_path / "wanstream"
    there.mkdir()
    parts = ("plan", "devices", "telemetry", "offload", "wan", "sampling", "distributed")
    for part in ("__init__.py", *parts):
        (there / part).symlink_to(FOLDER / part)
    shutil.copytree(FOLDER / "schema", there / "schema")
    (there / "schema" / "version.py").write_text('VERSION = "0.0.1"\n', encoding="utf-8")
    ref = WorkersRef(count=1, threads=1, paths=(PathMap(here=str(FOLDER), there=str(there)),))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    said = rf"worker 0 on .* has WanStream 0\.0\.1, the driver on .* {VERSION}: inst"
    with pytest.raises(ray_pool.VersionsError, match=said):
        ray_pool.RayPool(ref, "cpu", store_bytes=STORE_BYTES)
    children = psutil.Process().children(recursive=True)
    started = [process for process in children if process.pid not in before]
    _, left = psutil.wait_procs(started, timeout=LIMIT_S)
    assert left == []
