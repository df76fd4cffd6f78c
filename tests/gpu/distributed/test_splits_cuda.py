"""The same splits on GPUs, over NCCL: two devices with one worker each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema import OffloadPolicy
from wanstream.schema.mesh import Mesh
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.processes import Processes
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.split_jobs import SplitProcesses, job_leave_while_it_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two workers need two GPUs"),
]

LAYERWISE = OffloadPolicy.layerwise(1)


@pytest.fixture
def split(processes: Processes) -> Iterator[SplitProcesses]:
    """Processes that join as the ranks of a mesh, each on a different GPU.

    They leave after the test.
    """
    made = SplitProcesses(processes, "cuda")
    yield made
    made.leave()


@pytest.fixture
def wide(tiny_expert_folder: Callable[..., Path]) -> Callable[[str], ExpertsRef]:
    """`wide(dtype)`: experts with four heads."""

    def make(dtype: str) -> ExpertsRef:
        folders = (
            tiny_expert_folder(seed=seed, dtype=getattr(torch, dtype), heads=4) for seed in (1, 2)
        )
        return ExpertsRef(high_noise=next(folders), low_noise=next(folders), compute_dtype=dtype)

    return make


@pytest.fixture
def request_of_48_tokens(make_task: Callable[..., Any]) -> Any:
    noise = torch.randn(1, 16, 2, 8, 12, generator=torch.Generator().manual_seed(20))
    return make_task(request={"noise": noise}).request


def test_cfg_sides_give_what_one_worker_gives(
    split: SplitProcesses, wide: Any, request_of_48_tokens: Any
) -> None:
    split.join(Mesh(cfg=2))
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE
    alone = split.alone(*given)
    for side in split.run(*given):
        assert torch.equal(side["latents"], alone)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=str)
def test_shared_tokens_round_no_worse_than_one_worker_does(
    mesh: Mesh, split: SplitProcesses, wide: Any, request_of_48_tokens: Any
) -> None:
    split.join(mesh)
    exact = split.alone(wide("float32"), request_of_48_tokens, LAYERWISE, "cpu")
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE
    alone = split.alone(*given)
    results = split.run(*given)
    assert torch.equal(results[0]["latents"], results[1]["latents"])
    assert difference(results[0]["latents"], exact) <= 1.5 * difference(alone, exact)
    assert results[0]["gathered"] == results[0]["crossed"] > 0


def test_ulysses_in_fp32_gives_what_one_worker_gives(
    split: SplitProcesses, wide: Any, request_of_48_tokens: Any
) -> None:
    split.join(Mesh(ulysses=2))
    given = wide("float32"), request_of_48_tokens, LAYERWISE
    alone = split.alone(*given)
    for worker in split.run(*given):
        assert difference(worker["latents"], alone) <= ROUNDING


def test_the_same_processes_meet_five_times_and_leave_while_one_waits(
    split: SplitProcesses, wide: Any, request_of_48_tokens: Any
) -> None:
    given = wide("bfloat16"), request_of_48_tokens, LAYERWISE
    results = []
    for _ in range(5):
        split.join(Mesh(ulysses=2))
        results.append(split.run(*given)[0]["latents"])
        with pytest.raises(PeerLostError):
            split.processes[0].start(job_leave_while_it_waits, "ulysses").result()
        split.leave()
    assert all(torch.equal(each, results[0]) for each in results)
