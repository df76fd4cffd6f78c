"""The share of a step that one worker of a group computes."""

from __future__ import annotations

import pytest
import torch

from wanstream.distributed.messages import RendezvousSpec
from wanstream.distributed.worker.groups import ProcessGroups
from wanstream.distributed.worker.parallel_forward import GroupForward
from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.schema import Mesh
from wanstream.wan import Lane


def test_a_worker_that_has_left_reports_the_loss_of_its_peers() -> None:
    """The driver resumes a run after it, and not after an error of the worker's own."""
    place = RendezvousSpec(
        rank=0, mesh=Mesh(cfg=2), host="127.0.0.1", port=0, generation=0, timeout_s=1.0
    )
    groups = ProcessGroups(place, torch.device("cpu"))
    groups.leave()
    lane = Lane(latents=torch.zeros(1, 16, 1, 4, 4), text=torch.zeros(1, 1, 4096))
    with (
        pytest.raises(PeerLostError, match="left the rendezvous"),
        GroupForward(groups).computing([lane, lane]),
    ):
        pytest.fail("no lane can be shared")
