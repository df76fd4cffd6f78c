"""Workers are kept by value: one set at a time, from queue item to queue item."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch

from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.host.workers.registry import WorkerRegistry, start_pool
from wanstream.schema import Mesh
from wanstream.schema.refs import IN_PROCESS, WorkersError, WorkersRef

ONE = WorkersRef(count=1, address=IN_PROCESS)
CPU = torch.device("cpu")

SETUP = """
import sys
from dataclasses import replace
from wanstream.host.workers.registry import WorkerRegistry, check_ray
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
import torch
ONE = WorkersRef(count=1, address="in-process")
"""


class FakeWorker:
    """Worker that responds at once, or never."""

    def __init__(self, pool: FakePool, rank: int) -> None:
        self._pool = pool
        self.rank = rank

    def call(self, method: str) -> Future[None]:
        self._pool.said.append(method)
        answer: Future[None] = Future()
        if self._pool.hangs:
            return answer
        if self._pool.is_gone:
            answer.set_exception(WorkerLostError("gone", 0))
        else:
            answer.set_result(None)
        return answer

    def kill(self) -> None:
        self._pool.said.append("kill")


class FakePool:
    """Pool with recorded calls."""

    def __init__(self, ref: WorkersRef, device: torch.device) -> None:
        self.ref = ref
        self.device = device
        self.said: list[str] = []
        self.is_gone = self.hangs = False
        self.usable = True
        self.workers = [FakeWorker(self, rank) for rank in range(ref.count)]

    def close(self) -> None:
        self.said.append("end")


@dataclass(eq=False)
class FakeDriver:
    pool: FakePool
    ref: WorkersRef
    mesh: Mesh
    follows: FakeDriver | None
    is_running: bool = False


@pytest.fixture(autouse=True)
def fake_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanstream.host.workers.registry.Driver", FakeDriver)


@pytest.fixture
def started() -> list[FakePool]:
    return []


@pytest.fixture
def kept(started: list[FakePool]) -> WorkerRegistry:
    def start(ref: WorkersRef, device: torch.device) -> FakePool:
        assert all("end" in pool.said for pool in started), "two sets share a device"
        started.append(FakePool(ref, device))
        return started[-1]

    return WorkerRegistry(start)


def test_equal_references_find_the_same_workers(kept, started):
    driver = kept.get(ONE, Mesh(), CPU)
    assert kept.get(replace(ONE), Mesh(), CPU) is driver
    assert (driver.pool, driver.ref, driver.mesh) == (started[0], ONE, Mesh())
    # For example, their cluster has ended.
    started[0].usable = False
    assert kept.get(ONE, Mesh(), CPU).pool is started[1]
    assert [pool.said for pool in started] == [["end"], []]


def test_another_layout_is_another_driver_of_the_same_workers(kept, started):
    two = replace(ONE, count=2)
    stage = Mesh(stage=2)
    sides = kept.get(two, Mesh(cfg=2), CPU)
    stages = kept.get(two, stage, CPU)
    patient = kept.get(replace(two, mesh=stage, max_restarts=9, goal="throughput"), stage, CPU)
    assert len({id(driver) for driver in (sides, stages, patient)}) == 3
    assert sides.pool is stages.pool is patient.pool
    assert (sides.follows, stages.follows, patient.follows) == (None, sides, stages)
    assert patient.ref.max_restarts == 9
    assert (len(started), started[0].said) == (1, [])


@pytest.mark.parametrize(
    ("ref", "device"), [(replace(ONE, threads=1), CPU), (ONE, torch.device("meta"))]
)
def test_another_reference_ends_the_former_workers_first(kept, started, ref, device):
    kept.get(ONE, Mesh(), CPU)
    kept.get(ref, Mesh(), device)
    assert [pool.said for pool in started] == [["end"], []]
    assert (started[1].ref, started[1].device) == (replace(ref, mesh=Mesh()), device)


def test_resting_keeps_workers_and_closing_does_not(kept, started):
    assert kept.release_memory()
    kept.close()
    two = replace(ONE, count=2)
    driver = kept.get(two, Mesh(cfg=2), CPU)
    driver.is_running = True
    assert not kept.release_memory()
    assert started[0].said == [], "what runs is left alone"
    driver.is_running = False
    assert kept.release_memory()
    assert started[0].said == ["close", "close"], "each of them closes its experts"
    started[0].is_gone = True
    assert kept.release_memory(), "a dead worker has no memory"
    started[0].said.clear()
    kept.get(two, Mesh(cfg=2), CPU)
    kept.close()
    kept.close()
    assert started[0].said == ["end"]
    kept.get(two, Mesh(cfg=2), CPU)
    assert len(started) == 2


def test_hung_worker_is_ended_to_release_its_memory(kept, started, caplog, monkeypatch):
    """ComfyUI releases memory to load another model: a hung worker must not make that fail."""
    monkeypatch.setattr("wanstream.host.workers.registry.RELEASE_TIMEOUT_S", 0.05)
    kept.get(replace(ONE, count=2), Mesh(cfg=2), CPU)
    started[0].hangs = True
    assert kept.release_memory()
    assert sorted(started[0].said) == ["close", "close", "kill", "kill"]
    assert "worker 1 has not released its memory in 0.05 s" in caplog.text


def test_failed_start_leaves_nothing_behind():
    kept = WorkerRegistry(Mock(side_effect=OSError("the port is taken")))
    for _ in range(2):
        with pytest.raises(OSError, match="the port is taken"):
            kept.get(ONE, Mesh(), CPU)
    kept.close()


def output_of(code: str) -> str:
    """Return what a new process prints, with errors of Ray that it catches."""
    command = [sys.executable, "-c", f"{SETUP}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.integration
def test_workers_end_with_the_process():
    code = """
class Pool:
    def close(self): print("ended")
kept = WorkerRegistry(lambda ref, device: Pool())
kept.pool(ONE, torch.device("cpu"))
"""
    assert output_of(code) == "ended\n"


CHECK_RAY = """
check_ray(ONE)
try:
    check_ray(replace(ONE, address="local"))
except ValueError as err:
    print(type(err).__name__, err)
else:
    print("ray" in sys.modules)
"""


@pytest.mark.integration
def test_ray_is_looked_for_without_an_import():
    """Without site-packages, Ray cannot be found. One worker in this process needs none."""
    assert output_of(CHECK_RAY).startswith(("False", "RayMissingError"))
    hide = 'sys.path[:] = [place for place in sys.path if not place.endswith("-packages")]'
    said = output_of(f"{hide}\n{CHECK_RAY}")
    assert said.startswith("RayMissingError several workers need Ray, which is not installed")
    assert 'pip install "ray>=2.52"' in said


@pytest.mark.parametrize("family", ["xpu", "mps"])
def test_processes_need_a_device_that_they_can_connect(family):
    message = f"NCCL and gloo connect, and this is {family}: compute without workers"
    with pytest.raises(WorkersError, match=message):
        start_pool(WorkersRef(count=2), torch.device(family, 0))
