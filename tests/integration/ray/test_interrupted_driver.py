"""A driver with workers behind Ray, killed in the middle of a run: the same run continues."""

from __future__ import annotations

import pytest
import torch

from wanstream.schema import Mesh
from wanstream.tests.support.distributed.interrupted_driver import drive
from wanstream.tests.support.distributed.processes import Processes

pytest.importorskip("ray")
pytestmark = pytest.mark.integration


def test_run_of_a_killed_driver_continues_bit_exactly(make_task, alone, tmp_path):
    task, states = make_task(request={"solver": "unipc"}), tmp_path / "states"
    drivers = Processes().at_least(1)
    given = {"over": "ray", "handover_s": 0.0}
    try:
        with pytest.raises(RuntimeError, match="ended in the middle of a job"):
            drivers[0].start(drive, task, Mesh(cfg=2), states, given | {"dies_at": 2}).result()
        drivers.replace(0)
        latents, changes, done = (
            drivers[0].start(drive, task, Mesh(cfg=2), states, given | {"dies_at": None}).result()
        )
    finally:
        drivers.close()
    assert torch.equal(latents, alone(task))
    assert changes == ("continued from step 2 of an interrupted run",)
    assert done == [3, 4]
    assert not states.exists()
