"""The same splits on GPUs, over NCCL: two devices with one worker each."""

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema import Mesh
from wanstream.tests.support.distributed.split_jobs import SplitProcesses, job_leave_while_it_waits
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import LAYERWISE, normal

FEW = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two workers need two GPUs")
pytestmark = [pytest.mark.gpu, FEW]


@pytest.fixture
def split(processes):
    """Processes as ranks in a mesh, each on a different GPU."""
    made = SplitProcesses(processes, "cuda")
    yield made
    made.leave()


@pytest.fixture
def run_in(experts_ref, make_task):
    """`run_in(dtype)`: arguments of a run with 48 tokens, and experts with four heads."""
    request = make_task(request={"noise": normal(1, 16, 2, 8, 12, seed=20)}).request
    return lambda dtype: (experts_ref(dtype=dtype, heads=4), request, LAYERWISE)


def test_cfg_sides_give_what_one_worker_gives(split, run_in):
    split.join(Mesh(cfg=2))
    alone = split.alone(*run_in(torch.bfloat16))
    for side in split.run(*run_in(torch.bfloat16)):
        assert torch.equal(side["latents"], alone)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=str)
def test_shared_tokens_round_no_worse_than_one_worker_does(mesh, split, run_in):
    split.join(mesh)
    exact = split.alone(*run_in(torch.float32), "cpu")
    alone = split.alone(*run_in(torch.bfloat16))
    first, second = split.run(*run_in(torch.bfloat16))
    assert torch.equal(first["latents"], second["latents"])
    assert difference(first["latents"], exact) <= 1.5 * difference(alone, exact)
    assert first["gathered"] == first["crossed"] > 0


def test_ulysses_in_fp32_gives_what_one_worker_gives(split, run_in):
    split.join(Mesh(ulysses=2))
    alone = split.alone(*run_in(torch.float32))
    for worker in split.run(*run_in(torch.float32)):
        assert difference(worker["latents"], alone) <= ROUNDING


def test_processes_meet_five_times(split, run_in):
    results = []
    for _ in range(5):
        split.join(Mesh(ulysses=2))
        results.append(split.run(*run_in(torch.bfloat16))[0]["latents"])
        with pytest.raises(PeerLostError):
            split.processes[0].start(job_leave_while_it_waits, "ulysses").result()
        split.leave()
    assert all(torch.equal(each, results[0]) for each in results)
