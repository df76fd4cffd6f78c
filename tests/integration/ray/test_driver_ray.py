"""The driver with workers behind Ray, and tiles.

Workers are killed, runs are stopped, and nothing is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import psutil
import pytest
import torch

from wanstream.distributed import DecodeTask, Driver, decode_in_shared_tiles
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.memory_folder import names_in_shared_memory
from wanstream.wan.vae import Tiling, open_vae

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WORKERS = 4
STEPS, SWITCH = 8, 4
MESH = Mesh(stage=2, cfg=2)
STOPS = 2


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ref_of(mesh, **changes):
    return WorkersRef(count=mesh.size, threads=1, timeout_s=60.0, **changes)


@pytest.fixture(scope="module")
def pool():
    from wanstream.distributed.ray.pool import RayPool

    before = _left_behind()
    with RayPool(ref_of(MESH), store_bytes=200 << 20) as started:
        yield started
    assert not _stays_open(_left_behind, before), "nothing is left of it"


@pytest.fixture(scope="module")
def task(make_task):
    """Two videos with 8 steps, half of them on each expert."""
    steps = {"steps": STEPS, "switch_step": SWITCH, "solver": "unipc"}
    return make_task(request={"noise": normal(2, 16, 2, 4, 6, seed=1), **steps})


@pytest.fixture(scope="module")
def undisturbed(task, alone):
    return alone(task)


@pytest.fixture(scope="module")
def driver(pool):
    return Driver(pool, ref_of(MESH), MESH)


def pid_of(pool, rank):
    return int(pool.workers[rank].started.facts.pid)


def test_a_worker_that_is_killed_costs_no_video(pool, driver, task, undisturbed):
    killed = pid_of(pool, 0)
    steps: list[StepProgress] = []

    def on_step(step: StepProgress) -> None:
        steps.append(step)
        if step.done == STEPS:  # the handover to the second stage
            time.sleep(0.04)
            os.kill(killed, signal.SIGKILL)

    ran = driver.denoise(task.experts, task.request, task.policy, on_step=on_step)
    assert torch.equal(ran.latents, undisturbed)
    # No reported step is repeated.
    assert [step.done for step in steps] == list(range(1, 2 * STEPS + 1))
    # A stage with nothing left to do needs no other worker, until the next run.
    assert ran.restarts <= 1
    again = driver.denoise(task.experts, task.request, task.policy)
    assert torch.equal(again.latents, undisturbed)
    assert pid_of(pool, 0) != killed


def test_stopped_runs_leave_workers_and_machine_unchanged(pool, driver, task, undisturbed):
    driver.denoise(task.experts, task.request, task.policy)
    pids = [pid_of(pool, rank) for rank in range(WORKERS)]
    before = _open_things(pids)
    chance = random.Random(0)
    long = DenoiseRequest(**{**task.request.keywords(), "steps": 1000, "switch_step": 500})
    for _ in range(STOPS):
        stop = threading.Event()
        at = chance.randrange(0, 2 * STEPS - 1)
        timer = threading.Timer(chance.uniform(0, 0.1), stop.set)
        if at == 0:
            timer.start()

        def start_timer(step, at=at, timer=timer):
            if step.done == at:
                timer.start()

        how = {"should_stop": stop.is_set, "on_step": start_timer}
        with pytest.raises(SamplingCancelled):
            driver.denoise(task.experts, long, task.policy, **how)
        timer.join()
        ran = driver.denoise(task.experts, task.request, task.policy)
        assert torch.equal(ran.latents, undisturbed)
    assert [pid_of(pool, rank) for rank in range(WORKERS)] == pids
    assert not _stays_open(lambda: _open_things(pids), before)


def test_a_worker_that_is_killed_at_a_tile_costs_no_frame(pool, tiny_pipeline):
    """Two videos decoded in shared tiles, and by a single VAE."""
    task = DecodeTask(latents=3 * normal(2, 16, 2, 13, 14, seed=0), vae=tiny_pipeline())
    tiling = Tiling(pixels=64, stride=48)
    with open_vae(task.vae) as vae:
        needs = vae.decode_needs(task.latents)
        frames = vae.decode(task.latents, device="cpu", tiling=tiling)
    killed = pid_of(pool, 1)

    def on_tile(done: int, total: int) -> None:
        if done == 2:
            os.kill(killed, signal.SIGKILL)

    ref = ref_of(MESH, max_restarts=1)
    decoded = decode_in_shared_tiles(pool, ref, task, tiling, needs, on_tile=on_tile)
    assert torch.equal(decoded, frames)
    assert pid_of(pool, 1) != killed


def _left_behind() -> set[str]:
    """Return this process and all descendants, their listening ports, and shared memory files."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    running = (process for process in family if process.is_running())
    open_ports = [each for process in running for each in process.net_connections()]
    listening = {each.laddr.port for each in open_ports if each.status == psutil.CONN_LISTEN}
    names = names_in_shared_memory() | {f"process {process.pid}" for process in family}
    return names | {f"port {port}" for port in listening}


def _open_things(pids: list[int]) -> set[str]:
    """Return resources a stopped run could leak: worker sockets, shared memory, processes."""
    counts = {"processes": len(psutil.Process().children(recursive=True))}
    counts |= {f"connections of {pid}": len(psutil.Process(pid).net_connections()) for pid in pids}
    numbered = {f"{kind}: {at}" for kind, count in counts.items() for at in range(count)}
    return numbered | names_in_shared_memory()


def _stays_open(opened, before):
    """Return new resources still there after a minute.

    A leak stays. Ray's connections may end late on a busy machine, and other programs use shared
    memory too.
    """
    deadline = time.monotonic() + 60
    while (after := opened() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return after
