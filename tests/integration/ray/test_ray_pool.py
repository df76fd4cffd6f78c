"""Real workers in a real Ray on this machine.

They compute a single process's result, die, and are replaced.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from wanstream.distributed import Driver, RayPool, WorkerLostError
from wanstream.distributed.ray.environment import RaySetupError, import_ray
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.sampling.steps import RequestError, SamplingCancelled
from wanstream.schema import Mesh
from wanstream.schema.refs import ExpertsRef, WorkersError, WorkersRef
from wanstream.tests.support.distributed.reports import latents_of

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.integration

LIMIT_S = 120
STORE_BYTES = 128 << 20
LONG = {"steps": 1000, "switch_step": 500}
"""Request that takes longer than any test waits."""


@pytest.fixture(scope="module")
def untouched():
    """The environment and the SIGTERM handler before any worker was there.

    Ray is to take its calls unguarded.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield dict(os.environ), signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="module")
def pool(untouched):
    with RayPool(WorkersRef(count=2, threads=1), "cpu", store_bytes=STORE_BYTES) as pool:
        yield pool


def ignore(_): ...


def facts_of(pool):
    return [worker.call("facts").result(LIMIT_S) for worker in pool.workers]


def driver_of(pool: RayPool) -> Driver:
    return Driver(pool, WorkersRef(count=2, threads=1), Mesh(cfg=2))


def leave(pool: RayPool) -> None:
    """Let the workers leave the rendezvous, to compute alone again."""
    for left in [worker.call("leave") for worker in pool.workers]:
        left.result(LIMIT_S)


def test_workers_are_processes_of_their_own_on_loopback(pool):
    facts = facts_of(pool)
    assert len({each.pid for each in facts} | {os.getpid()}) == 3
    assert [(each.address, each.device) for each in facts] == [("127.0.0.1", "cpu")] * 2
    assert {each.machine for each in facts} == {import_ray().get_runtime_context().get_node_id()}
    assert [worker.started.requires_token for worker in pool.workers] == [True, True]
    assert [worker.rank for worker in pool.workers] == [0, 1]


def test_shared_request_is_stored_once_until_the_run_ends(pool, make_task, alone, monkeypatch):
    task = make_task()
    put = mock.Mock(wraps=ray.put)
    monkeypatch.setattr(ray, "put", put)
    driver = driver_of(pool)
    for _ in range(2):
        ran = driver.denoise(task.experts, task.request, task.policy)
        assert torch.equal(ran.latents, alone(task))
        assert pool._shared == {}
    assert put.call_count == 2, "once per run, for two workers"
    assert ran.gathered_bytes == 2 * 4 * task.request.noise.numel() * 4, "a velocity per step"
    leave(pool)


def test_questions_and_stops_are_heard_beside_a_run(pool, make_task, alone):
    worker = pool.workers[0]
    pids = []
    task = make_task(request=LONG)

    def on_report(report):
        if report.record.index == 1:
            pids.append(worker.call("facts").result(LIMIT_S).pid)
            worker.call("stop", task.run_id).result(LIMIT_S)

    with pytest.raises(SamplingCancelled) as cancelled:
        worker.run(task, on_report).result(LIMIT_S)
    assert cancelled.value.step < LONG["steps"]
    assert pids == [worker.started.facts.pid]
    after = make_task()
    assert torch.equal(latents_of(worker, after), alone(after))


def test_errors_of_a_worker_come_out_as_they_are(pool, make_task, alone, tmp_path):
    worker = pool.workers[1]
    gone = ExpertsRef(high_noise=tmp_path / "gone", low_noise=tmp_path / "gone")
    with pytest.raises(ValueError, match="gone"):
        worker.run(make_task(experts=gone), ignore).result(LIMIT_S)
    with pytest.raises(RequestError, match="takes steps 0 to 4"):
        worker.run(make_task(until=9), ignore).result(LIMIT_S)
    with pytest.raises(AttributeError):
        worker.call("nonsense").result(LIMIT_S)
    # An error of who is told ends the run.
    with pytest.raises(ZeroDivisionError):
        worker.run(make_task(request=LONG), lambda _: 1 / 0).result(LIMIT_S)
    after = make_task()
    assert torch.equal(latents_of(worker, after), alone(after))


def test_everything_listens_on_loopback(pool, make_task):
    task = make_task()
    driver_of(pool).denoise(task.experts, task.request, task.policy)
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    assert {"gcs_server", "raylet"} <= {process.name() for process in processes}
    open_ports = [(each.pid, port) for each in processes for port in each.net_connections()]
    listening = {(pid, p.laddr.ip) for pid, p in open_ports if p.status == psutil.CONN_LISTEN}
    assert {each.pid for each in facts_of(pool)} <= {pid for pid, _ in listening}
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    leave(pool)


def test_the_user_finds_the_process_as_it_was(pool, untouched):
    environment, handler = untouched
    test = {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}
    assert {**os.environ} == {**environment, **test}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_pool_shares_this_ray(pool, make_task):
    two = WorkersRef(count=2)
    foreign = replace(two, address="localhost.evil.example:6379")
    for ref, device, error, said in (
        (replace(two, count=10_000), "cpu", RaySetupError, r"10000 .* Ray has slots for \d+"),
        (two, "cuda", RaySetupError, "2 workers, but Ray has 0 GPUs"),
        (foreign, "cpu", WorkersError, r"localhost\.evil\.example:6379 is another machine"),
    ):
        with pytest.raises(error, match=said):
            RayPool(ref, device)
    task = make_task()
    assert latents_of(pool.workers[0], task).shape == task.request.noise.shape


def test_a_killed_worker_is_lost_and_replaced(pool, make_task, alone):
    worker, other = pool.workers
    pid = worker.started.facts.pid

    def on_report(report):
        if report.record.index == 1:
            os.kill(pid, signal.SIGKILL)

    task = make_task(request=LONG)
    said = rf"worker 0 \(process {pid} on .*, cpu\) is gone: .+"
    with pytest.raises(WorkerLostError, match=said) as lost:
        worker.run(task, on_report).result(LIMIT_S)
    assert lost.value.rank == 0
    with pytest.raises(WorkerLostError):
        worker.call("facts").result(LIMIT_S)
    with pytest.raises(WorkerLostError):
        worker.run(make_task(), ignore).result(LIMIT_S)
    again = pool.replace(0)
    assert pool.workers == (again, other)
    assert again.started.facts.pid not in (pid, other.started.facts.pid)
    task = make_task()
    ran = driver_of(pool).denoise(task.experts, task.request, task.policy)
    assert torch.equal(ran.latents, alone(task))
    leave(pool)


def test_a_lost_worker_leaves_the_end_of_its_log(pool):
    worker = pool.workers[1]
    process = psutil.Process(worker.started.facts.pid)
    os.kill(process.pid, signal.SIGSEGV)
    process.wait(LIMIT_S)
    with pytest.raises(WorkerLostError, match="Fatal Python error: Segmentation fault"):
        worker.call("facts").result(LIMIT_S)
    assert "Fatal Python error" in worker.log_tail()
    assert ":actor_name:" not in worker.log_tail()
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerLostError, match="it was ended from here"):
        worker.call("facts").result(LIMIT_S)
    assert pool.replace(1).call("facts").result(LIMIT_S).pid != process.pid


def test_killing_ends_a_process_that_hangs_in_a_run(pool, make_task):
    worker = pool.workers[0]
    process = psutil.Process(worker.started.facts.pid)

    def on_report(report):
        process.suspend()
        worker.kill()

    run = worker.run(make_task(request=LONG), on_report)
    with pytest.raises(WorkerLostError, match="it was ended from here"):
        run.result(LIMIT_S)
    process.wait(LIMIT_S)
    with pytest.raises(WorkerLostError):
        worker.run(make_task(), ignore).result(LIMIT_S)


def test_closing_leaves_nothing_behind(pool, make_task):
    own = psutil.Process()
    children = own.children(recursive=True)
    of_ray = [process for process in children if "ray" in " ".join(process.cmdline())]
    folders = {Path(log).parents[2] for worker in pool.workers for log in worker.started.logs}
    assert folders
    assert of_ray
    begun = threading.Event()
    run = pool.workers[1].run(make_task(request=LONG), lambda _: begun.set())
    assert begun.wait(LIMIT_S)
    replacing = run_in_thread("replace", pool.replace, 0)
    deadline = time.monotonic() + LIMIT_S
    while set(own.children(recursive=True)) <= {*children} and time.monotonic() < deadline:
        time.sleep(0.05)
    pool.close()
    with pytest.raises(RaySetupError):
        replacing.result(LIMIT_S)
    with pytest.raises(RaySetupError, match="the pool was closed"):
        pool.replace(0)
    assert not ray.is_initialized(), "Ray starts anew when it is facts for something after its end"
    with pytest.raises(WorkerLostError):
        run.result(LIMIT_S)
    _, alive = psutil.wait_procs(of_ray, timeout=LIMIT_S)
    assert alive == []
    assert not [folder for folder in folders if folder.exists()]
    with pytest.raises(WorkerLostError):
        pool.workers[0].call("facts").result(LIMIT_S)
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_worker_has_a_gpu_of_its_own(make_task):
    gpus = torch.cuda.device_count()
    with pytest.raises(RaySetupError, match=f"{gpus + 1} workers, but Ray has {gpus} GPU"):
        RayPool(WorkersRef(count=gpus + 1), "cuda", store_bytes=STORE_BYTES)
    with RayPool(WorkersRef(count=gpus), "cuda", store_bytes=STORE_BYTES) as pool:
        assert [worker.started.facts.device for worker in pool.workers] == ["cuda:0"] * gpus
        task = make_task()
        first, *rest = [latents_of(worker, task) for worker in pool.workers]
        assert all(torch.equal(first, latents) for latents in rest)
