"""The driver with workers on GPUs.

Splits without data exchange give the same bits as one GPU, also after a loss.
"""

import os
import signal
from contextlib import closing

import pytest
import torch

from wanstream.distributed import Driver, InProcessPool, RayPool
from wanstream.sampling.steps import StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.sampling.runs import normal

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
pytestmark = [pytest.mark.gpu, NO_GPU]

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")


@pytest.fixture
def task(make_task):
    noise = normal(3, 16, 2, 4, 6, seed=1)
    return make_task(request={"noise": noise, "steps": 6, "switch_step": 3, "solver": "unipc"})


@pytest.fixture
def on_one_gpu(task, alone):
    return alone(task, device="cuda")


def run(driver, task, **how):
    return driver.denoise(task.experts, task.request, task.policy, **how)


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("ray")
    with RayPool(WorkersRef(count=2), "cuda", store_bytes=200 << 20) as started:
        yield started


def test_one_worker_in_this_process(task, on_one_gpu):
    with closing(InProcessPool("cuda")) as pool:
        ran = run(Driver(pool, WorkersRef(count=1), Mesh()), task)
    assert torch.equal(ran.latents, on_one_gpu)
    assert ran.timeline.steps[0].memory.device_bytes


@several
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(stage=2), Mesh(cfg=2)], ids=str)
def test_two_gpus_give_what_one_gives(mesh, pool, task, on_one_gpu):
    assert torch.equal(run(Driver(pool, WorkersRef(count=2), mesh), task).latents, on_one_gpu)


@several
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(stage=2), Mesh(cfg=2)], ids=str)
def test_a_worker_that_is_killed_costs_no_video(mesh, pool, task, on_one_gpu):
    def on_step(step: StepProgress) -> None:
        if step.done == 4:
            os.kill(pool.workers[1].started.facts.pid, signal.SIGKILL)

    ran = run(Driver(pool, WorkersRef(count=2, timeout_s=60.0), mesh), task, on_step=on_step)
    assert torch.equal(ran.latents, on_one_gpu)
    assert ran.restarts == 1
