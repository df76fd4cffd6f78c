"""The driver with workers on GPUs.

Splits without data exchange give the same bits as one GPU, also after a loss.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.messages import RunTask
from wanstream.distributed.transport.in_process import InProcessPool
from wanstream.sampling import denoise
from wanstream.sampling.steps import StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
from wanstream.wan.experts.open import ExpertsRegistry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")

MakeTask = Callable[..., RunTask]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def task(make_task: MakeTask) -> RunTask:
    return make_task(
        request={
            "noise": normal(3, 16, 2, 4, 6, seed=1),
            "steps": 6,
            "switch_step": 3,
            "solver": "unipc",
        }
    )


@pytest.fixture
def on_one_gpu(task: RunTask) -> torch.Tensor:
    experts = ExpertsRegistry()
    try:
        return denoise(
            experts.get(task.experts), task.request, policy=task.policy, device="cuda"
        ).latents
    finally:
        experts.free()


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    pytest.importorskip("ray")
    from wanstream.distributed.ray.pool import RayPool

    with RayPool(WorkersRef(count=2), "cuda", store_bytes=200 << 20) as started:
        yield started


def test_one_worker_in_this_process(task: RunTask, on_one_gpu: torch.Tensor) -> None:
    pool = InProcessPool("cuda")
    try:
        ran = Driver(pool, WorkersRef(count=1), Mesh()).denoise(
            task.experts, task.request, task.policy
        )
    finally:
        pool.close()
    assert torch.equal(ran.latents, on_one_gpu)
    assert ran.timeline.steps[0].memory.device_bytes


@several
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(stage=2), Mesh(cfg=2)], ids=str)
def test_two_gpus_give_what_one_gives(
    mesh: Mesh, pool: Any, task: RunTask, on_one_gpu: torch.Tensor
) -> None:
    ran = Driver(pool, WorkersRef(count=2), mesh).denoise(task.experts, task.request, task.policy)
    assert torch.equal(ran.latents, on_one_gpu)


@several
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(stage=2), Mesh(cfg=2)], ids=str)
def test_a_worker_that_is_killed_costs_no_video(
    mesh: Mesh, pool: Any, task: RunTask, on_one_gpu: torch.Tensor
) -> None:
    def on_step(step: StepProgress) -> None:
        if step.done == 4:
            os.kill(pool.workers[1].started.facts.pid, signal.SIGKILL)

    driver = Driver(pool, WorkersRef(count=2, timeout_s=60.0), mesh)
    ran = driver.denoise(task.experts, task.request, task.policy, on_step=on_step)
    assert torch.equal(ran.latents, on_one_gpu)
    assert ran.restarts == 1
