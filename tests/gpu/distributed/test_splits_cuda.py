"""The same splits on GPUs, over NCCL: one worker for each of two devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema import ExpertsRef, OffloadPolicy
from wanstream.schema.mesh import Mesh
from wanstream.tests.support.rounding import difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two workers need two GPUs"),
]

LAYERWISE = OffloadPolicy.layerwise(1)


@pytest.fixture
def join(processes: Any, split_jobs: Any) -> Any:
    """`join(mesh)`: join with two processes, each on its own GPU; leave after the test."""

    def make(mesh: Mesh) -> None:
        processes.all(split_jobs.job_meet_on_gpu, split_jobs.rendezvous(mesh), count=2)

    yield make
    processes.all(split_jobs.job_leave, count=2)


@pytest.fixture
def wide(tiny_expert_folder: Callable[..., Path]) -> Callable[[str], ExpertsRef]:
    """`wide(dtype)`: experts with four heads."""

    def make(dtype: str) -> ExpertsRef:
        folders = (tiny_expert_folder(seed=seed, dtype=getattr(torch, dtype), heads=4) for seed in (1, 2))
        return ExpertsRef(high_noise=next(folders), low_noise=next(folders), compute_dtype=dtype)

    return make


@pytest.fixture
def request_of_48_tokens(make_task: Callable[..., Any]) -> Any:
    noise = torch.randn(1, 16, 2, 8, 12, generator=torch.Generator().manual_seed(20))
    return make_task(request={"noise": noise}).request


def test_cfg_sides_give_what_one_worker_gives(
    processes: Any, split_jobs: Any, join: Any, wide: Any, request_of_48_tokens: Any
) -> None:
    join(Mesh(cfg=2))
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE, "cuda"
    alone = processes[0].start(split_jobs.job_run_alone, *given).result()
    for side in processes.all(split_jobs.job_run, *given, count=2):
        assert torch.equal(side["latents"], alone)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=str)
def test_shared_tokens_round_no_worse_than_one_worker_does(
    mesh: Mesh, processes: Any, split_jobs: Any, join: Any, wide: Any, request_of_48_tokens: Any
) -> None:
    join(mesh)
    exact = processes[0].start(split_jobs.job_run_alone, wide("float32"), request_of_48_tokens, LAYERWISE).result()
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE, "cuda"
    alone = processes[0].start(split_jobs.job_run_alone, *given).result()
    results = processes.all(split_jobs.job_run, *given, count=2)
    assert torch.equal(results[0]["latents"], results[1]["latents"])
    assert difference(results[0]["latents"], exact) <= 1.5 * difference(alone, exact)
    assert results[0]["gathered"] == results[0]["crossed"] > 0


def test_ulysses_in_fp32_gives_what_one_worker_gives(
    processes: Any, split_jobs: Any, join: Any, wide: Any, request_of_48_tokens: Any
) -> None:
    join(Mesh(ulysses=2))
    given = wide("float32"), request_of_48_tokens, LAYERWISE, "cuda"
    alone = processes[0].start(split_jobs.job_run_alone, *given).result()
    for worker in processes.all(split_jobs.job_run, *given, count=2):
        assert difference(worker["latents"], alone) <= 1e-6


def test_the_same_processes_meet_five_times_and_leave_while_one_waits(
    processes: Any, split_jobs: Any, join: Any, wide: Any, request_of_48_tokens: Any
) -> None:
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE, "cuda"
    results = []
    for _ in range(5):
        join(Mesh(ulysses=2))
        results.append(processes.all(split_jobs.job_run, *given, count=2)[0]["latents"])
        with pytest.raises(PeerLostError):
            processes[0].start(split_jobs.job_leave_while_it_waits, "ulysses").result()
        processes.all(split_jobs.job_leave, count=2)
    assert all(torch.equal(each, results[0]) for each in results)
