"""Messages about a worker lost behind a fake Ray, and the end of the worker's process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.distributed.ray.actor import Started
from wanstream.distributed.ray.connection import CONNECTION
from wanstream.distributed.ray.pool import RayWorkerHandle
from wanstream.distributed.worker.worker import Worker

HERE = "this machine"
CLUSTER = "127.0.0.1:6379"

Lose = Callable[..., str]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Lose:
    """`lose(address, logs, node=HERE)` returns the message about a worker with such logs."""

    def message(address: str, logs: tuple[str, ...], node: str = HERE) -> str:
        monkeypatch.setattr(CONNECTION, "address", address)
        return str(worker(logs, node).call("facts").exception(0)).partition("is gone: ")[2]

    return message


def worker(logs: tuple[str, ...] = (), node: str = HERE, pid: int | None = None) -> RayWorkerHandle:
    facts = Worker("cpu", machine=node).facts()
    started = Started(
        facts=replace(facts, node=node, pid=pid or facts.pid),
        logs=logs,
        requires_token=False,
        process="p",
    )
    ray: Any = SimpleNamespace(
        is_initialized=lambda: False,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: HERE),
    )
    return RayWorkerHandle(ray, {}, None, 0, started)


def test_the_end_of_a_log_is_shown_and_its_path_only_if_the_log_stays(
    lose: Lose, tmp_path: Path
) -> None:
    log, empty = tmp_path / "worker.out", tmp_path / "worker.err"
    log.write_text(":job_id:01\nout of memory\n")
    empty.touch()
    logs = (str(log), str(empty))
    assert lose("local", logs) == "it was ended from here\nThe end of its log:\nout of memory"
    assert (
        lose(CLUSTER, logs)
        == f"it was ended from here\nThe end of its log ({log} and {empty}):\nout of memory"
    )


@pytest.mark.parametrize("address", ["local", CLUSTER])
def test_an_empty_log_is_not_named(lose: Lose, tmp_path: Path, address: str) -> None:
    (tmp_path / "worker.out").touch()
    assert lose(address, (str(tmp_path / "worker.out"),)) == "it was ended from here"


def test_a_log_on_another_machine_is_named_with_the_machine(lose: Lose, tmp_path: Path) -> None:
    there = str(tmp_path / "not here")
    assert (
        lose(CLUSTER, (there,), "node-b") == f"it was ended from here; its log on node-b is {there}"
    )
    assert lose("local", (there,)) == "it was ended from here", "our Ray has removed it"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait(30)


@pytest.mark.integration
@pytest.mark.parametrize("is_alive", [False, True])
def test_a_worker_whose_ray_is_gone_is_ended_from_here(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    monkeypatch.setattr(CONNECTION, "is_alive", lambda: is_alive)
    worker(pid=process.pid).wait_for_end(1.0 if is_alive else 30.0)
    assert (process.poll() is None) == is_alive


@pytest.mark.parametrize(
    ("server", "is_alive", "has_ray"),
    [
        ("127.0.0.1:6379", True, True),
        ("127.0.0.1:6379", False, False),
        ("10.0.0.5:6379", False, True),
    ],
)
def test_a_server_on_another_machine_may_be_cut_off_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, server: str, is_alive: bool, has_ray: bool
) -> None:
    monkeypatch.setattr(CONNECTION, "is_alive", lambda: is_alive)
    monkeypatch.setattr(CONNECTION, "_server", server)
    assert worker().has_ray() == has_ray
