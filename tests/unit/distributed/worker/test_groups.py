"""Collectives never ended by torch.distributed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from wanstream.distributed.messages import RendezvousSpec
from wanstream.distributed.worker.groups import GroupsState, ProcessGroups
from wanstream.schema import Mesh


class Unfinished:
    """Collective work that never ends."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def __call__(self, *_: object, group: object, async_op: bool) -> Unfinished:
        assert async_op
        return self

    __name__ = "all_gather"

    def get_future(self) -> torch.futures.Future[None]:
        return self.future

    def wait(self) -> None:
        self.future.wait()


def test_exchange_ends_with_its_connections():
    place = RendezvousSpec(
        rank=0, mesh=Mesh(cfg=2), host="127.0.0.1", port=0, generation=0, timeout_s=1.0
    )
    groups = ProcessGroups(place, torch.device("cpu"))
    groups.state = GroupsState.JOINED
    groups._groups = {"weights": dist.group.WORLD}  # type: ignore[dict-item]
    work = Unfinished()
    breaking = threading.Timer(0.1, groups.abort_gathers)
    breaking.start()
    with pytest.raises(dist.DistError, match="all_gather goes on"):
        groups.exchange(work, group="weights")
    (outlasting,) = (each for each in threading.enumerate() if each.name == "wanstream-outlast")
    work.future.set_result(None)
    outlasting.join(10)
    assert not outlasting.is_alive()
    groups.exchange(work, group="weights")
