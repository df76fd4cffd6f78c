"""The same splits on GPUs, over NCCL: two devices with one worker each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema.mesh import Mesh
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.distributed.split_jobs import SplitProcesses, job_leave_while_it_waits
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import LAYERWISE, normal

FEW = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two workers need two GPUs")
pytestmark = [pytest.mark.gpu, FEW]

Runs = tuple[SplitProcesses, Callable[[str], tuple[Any, ...]]]


@pytest.fixture
def runs(processes, tiny_expert_folder, make_task) -> Iterator[Runs]:
    """Processes that join as the ranks of a mesh, each on a different GPU, and a run's arguments.

    The run has 48 tokens and experts with four heads. The processes leave after the test.
    """
    split = SplitProcesses(processes, "cuda")
    request = make_task(request={"noise": normal(1, 16, 2, 8, 12, seed=20)}).request

    def run_in(dtype: str) -> tuple[Any, ...]:
        how = {"dtype": getattr(torch, dtype), "heads": 4}
        high, low = (tiny_expert_folder(seed=seed, **how) for seed in (1, 2))
        return ExpertsRef(high_noise=high, low_noise=low, compute_dtype=dtype), request, LAYERWISE

    yield split, run_in
    split.leave()


def test_cfg_sides_give_what_one_worker_gives(runs):
    split, run_in = runs
    split.join(Mesh(cfg=2))
    alone = split.alone(*run_in("bfloat16"))
    for side in split.run(*run_in("bfloat16")):
        assert torch.equal(side["latents"], alone)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=str)
def test_shared_tokens_round_no_worse_than_one_worker_does(mesh, runs):
    split, run_in = runs
    split.join(mesh)
    exact = split.alone(*run_in("float32"), "cpu")
    alone = split.alone(*run_in("bfloat16"))
    first, second = split.run(*run_in("bfloat16"))
    assert torch.equal(first["latents"], second["latents"])
    assert difference(first["latents"], exact) <= 1.5 * difference(alone, exact)
    assert first["gathered"] == first["crossed"] > 0


def test_ulysses_in_fp32_gives_what_one_worker_gives(runs):
    split, run_in = runs
    split.join(Mesh(ulysses=2))
    alone = split.alone(*run_in("float32"))
    for worker in split.run(*run_in("float32")):
        assert difference(worker["latents"], alone) <= ROUNDING


def test_processes_meet_five_times(runs):
    split, run_in = runs
    results = []
    for _ in range(5):
        split.join(Mesh(ulysses=2))
        results.append(split.run(*run_in("bfloat16"))[0]["latents"])
        with pytest.raises(PeerLostError):
            split.processes[0].start(job_leave_while_it_waits, "ulysses").result()
        split.leave()
    assert all(torch.equal(each, results[0]) for each in results)
