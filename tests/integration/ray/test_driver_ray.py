"""The driver with workers behind Ray: stopped runs, a killed worker, and nothing left behind."""

import os
import signal
import time

import psutil
import pytest
import torch

from wanstream.distributed import DecodeTask, Driver, RayPool, decode_in_shared_tiles
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.memory_folder import names_in_shared_memory
from wanstream.tests.support.sampling.runs import changed_request, normal
from wanstream.wan.vae import Tiling, open_vae

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

MESH = Mesh(stage=2, cfg=2)
REF = WorkersRef(count=MESH.size, threads=1, timeout_s=60.0, max_restarts=1)


@pytest.fixture(scope="module")
def pool():
    own = [os.getpid()]
    before = _open_things(own)
    with RayPool(REF, store_bytes=200 << 20) as started:
        yield started
    assert not _stays_open(own, before), "nothing is left of it"


def pids_of(pool):
    return [worker.started.facts.pid for worker in pool.workers]


def test_stopped_runs_leave_workers_and_machine_unchanged(pool, make_task, alone):
    """Two videos. The second stop comes when both stages compute."""
    steps = {"steps": 8, "switch_step": 4, "solver": "unipc"}
    task = make_task(request={"noise": normal(2, 16, 2, 4, 6, seed=1), **steps})
    long = changed_request(task.request, steps=60, switch_step=30)
    driver = Driver(pool, REF, MESH)
    driver.denoise(task.experts, task.request, task.policy)
    pids = pids_of(pool)
    before = _open_things(pids)
    for at in (1, 40):
        done = list[StepProgress]()
        how = {"on_step": done.append, "should_stop": lambda at=at, done=done: len(done) >= at}
        with pytest.raises(SamplingCancelled):
            driver.denoise(task.experts, long, task.policy, **how)
        ran = driver.denoise(task.experts, task.request, task.policy)
        assert torch.equal(ran.latents, alone(task))
    assert pids_of(pool) == pids
    assert not _stays_open(pids, before)


def test_a_worker_that_is_killed_at_a_tile_costs_no_frame(pool, tiny_pipeline):
    """Two videos decoded in shared tiles, and by a single VAE."""
    task = DecodeTask(latents=3 * normal(2, 16, 2, 13, 14, seed=0), vae=tiny_pipeline())
    tiling = Tiling(pixels=64, stride=48)
    with open_vae(task.vae) as vae:
        needs = vae.decode_needs(task.latents)
        frames = vae.decode(task.latents, device="cpu", tiling=tiling)
    killed = pids_of(pool)[1]

    def on_tile(done: int, total: int) -> None:
        if done == 2:
            os.kill(killed, signal.SIGKILL)

    decoded = decode_in_shared_tiles(pool, REF, task, tiling, needs, on_tile=on_tile)
    assert torch.equal(decoded, frames)
    assert pids_of(pool)[1] != killed


def _open_things(pids: list[int]) -> set[str]:
    """Return resources of `pids` still open: sockets, shared memory, processes."""
    counts = {"processes": len(psutil.Process().children(recursive=True))}
    counts |= {f"connections of {pid}": len(psutil.Process(pid).net_connections()) for pid in pids}
    numbered = {f"{kind}: {at}" for kind, count in counts.items() for at in range(count)}
    return numbered | names_in_shared_memory()


def _stays_open(pids, before):
    """Return new resources still there after a minute.

    A leak stays. Ray's connections may end late on a busy machine, and other programs use shared
    memory too.
    """
    deadline = time.monotonic() + 60
    while (after := _open_things(pids) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return after
