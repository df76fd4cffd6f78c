"""Actors' services: their number, and checks of their machines."""

from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.distributed import WorkerLostError, open_services
from wanstream.distributed.path_map import DifferentFilesError, MissingPathError
from wanstream.distributed.ray import services as services_module
from wanstream.distributed.ray.pool import VersionsError
from wanstream.distributed.ray.services import service_count
from wanstream.distributed.worker.worker import Worker
from wanstream.schema.refs import PathMap, WorkersError, WorkersRef


def test_each_gpu_has_a_process_unless_a_number_is_given():
    resources = {"GPU": 8.0, "CPU": 16.0}
    assert service_count(resources, "local", device="cuda", count=None) == 8
    assert service_count(resources, "local", device="cuda", count=2) == 2
    assert service_count({"CPU": 16.0}, "local", device="cpu", count=4) == 4
    message = r"the Ray at 10\.0\.0\.1:6379 has no GPU that it can .* \(--device cpu --workers N\)"
    for count in (2, None):
        with pytest.raises(WorkersError, match=message):
            service_count({"CPU": 16.0}, "10.0.0.1:6379", device="cuda", count=count)


class OneWorker:
    """Worker in an actor's process, with this machine's files."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.changes = dict[str, Any]()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        found = getattr(Worker("cpu", machine="m"), method)(*args)
        future.set_result(replace(found, **self.changes))
        return future


@pytest.fixture
def services(monkeypatch):
    """`with services(workers, path, *maps)`: the check for a restarted worker's machine.

    It is that of `open_services` with these workers.
    """

    @contextmanager
    def opened(workers, path, *maps):
        pool = SimpleNamespace(workers=workers)
        ray = SimpleNamespace(cluster_resources=dict)
        connection = SimpleNamespace(acquire=lambda _: ray, release=lambda: None)
        monkeypatch.setattr(services_module, "RayPool", lambda *_, **__: nullcontext(pool))
        monkeypatch.setattr(services_module, "CONNECTION", connection)
        given = {"device": "cpu", "count": len(workers), "paths": [path]}
        with open_services(WorkersRef(count=1, paths=maps), ("", {}), **given) as (_, check):
            yield check

    return opened


def test_restarted_actor_needs_equal_files_and_versions(tmp_path, services):
    model = tmp_path / "model"
    workers = [OneWorker(0), OneWorker(1)]
    model.write_bytes(b"12")
    versions = {**Worker("cpu", machine="m").facts().versions, "torch": "1.0"}
    with services(workers, model) as check_machine:
        check_machine(workers[1])
        for change, error, message in (
            ({"sizes": {str(model): 3}}, DifferentFilesError, r"2 bytes on .* and 3 bytes on an"),
            ({"versions": versions}, VersionsError, r"worker 1 on another has torch 1\.0"),
        ):
            workers[1].changes = {"node": "another", **change}
            with pytest.raises(error, match=message):
                check_machine(workers[1])
        check_machine(workers[0])


def test_actor_without_the_models_is_refused(tmp_path, services, monkeypatch):
    def open_once(worker: OneWorker) -> None:
        there = PathMap(here=str(tmp_path), there=str(tmp_path / "mounted"))
        with services([worker], tmp_path / "models", there):
            pass

    missing = f"{tmp_path / 'mounted' / 'models'} or {tmp_path / 'models'} does not exist on"
    remedy = rf"add its folder there to the path_map of the cluster .* \(the map is {tmp_path} ->"
    with pytest.raises(MissingPathError, match=f"{missing}.*{remedy}"):
        open_once(OneWorker())
    (tmp_path / "mounted" / "models").mkdir(parents=True)
    open_once(OneWorker())

    def lost(*_: Any) -> Future[Any]:
        raise WorkerLostError("worker 0 is gone", 0)

    worker = OneWorker()
    monkeypatch.setattr(worker, "call", lost)
    with pytest.raises(ValueError, match="worker 0 is gone"):
        open_once(worker)
