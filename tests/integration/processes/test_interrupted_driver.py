"""A driver killed in the middle of a run: the same run continues from the states on disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from wanstream.schema import Mesh
from wanstream.tests.support.distributed.interrupted_driver import drive
from wanstream.tests.support.distributed.processes import Processes

pytestmark = pytest.mark.integration

NEVER_S = 1e9


@pytest.fixture
def drivers(processes: Processes) -> Iterator[Processes]:
    """Processes for drivers that start processes themselves."""
    yield processes.at_least(1)
    processes.replace(0)  # the job has changed modules


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("mesh", "videos", "handover_s", "dies_at", "continued"),
    [
        (Mesh(cfg=2), 1, 0.0, 2, ("continued from step 2 of an interrupted run",)),
        (Mesh(stage=2), 1, NEVER_S, 3, ("continued from step 2 of an interrupted run",)),
        (Mesh(data=2), 3, 0.0, 3, None),
    ],
    ids=["cfg 2", "stage 2, at the end of a stage", "data 2"],
)
def test_run_of_a_killed_driver_continues(
    mesh, videos, handover_s, dies_at, continued, drivers, make_task, alone, tmp_path
):
    task = make_task(request={"noise": normal(videos, 16, 2, 4, 6, seed=5), "solver": "unipc"})
    states = tmp_path / "states"
    given = {"handover_s": handover_s}
    with pytest.raises(RuntimeError, match="ended in the middle of a job"):
        drivers[0].start(drive, task, mesh, states, given | {"dies_at": dies_at}).result()
    drivers.replace(0)
    latents, changes, done = (
        drivers[0].start(drive, task, mesh, states, given | {"dies_at": None}).result()
    )
    assert torch.equal(latents, alone(task))
    assert not states.exists()
    assert done == list(range(done[0], done[-1] + 1))
    if continued is None:
        assert 1 <= len(changes) <= 2
        assert dies_at < done[0] <= dies_at + 3
    else:
        assert changes == continued
        assert done[0] == 3
