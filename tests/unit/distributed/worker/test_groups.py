"""Collectives never ended by torch.distributed."""

import threading

import pytest
import torch
import torch.distributed as dist

from wanstream.distributed.worker.groups import GroupsState, ProcessGroups
from wanstream.schema import Mesh
from wanstream.tests.support.distributed.split_jobs import rendezvous


class Unfinished:
    """Collective work that never ends."""

    __name__ = "all_gather"

    def __init__(self):
        self.future = torch.futures.Future()
        self.get_future = lambda: self.future
        self.wait = self.future.wait

    def __call__(self, *_, group, async_op):
        assert async_op
        return self


def test_exchange_ends_with_its_connections():
    groups = ProcessGroups(rendezvous(Mesh(cfg=2))[0], torch.device("cpu"))
    groups.state = GroupsState.JOINED
    groups._groups = {"weights": dist.group.WORLD}
    work = Unfinished()
    threading.Timer(0.1, groups.abort_gathers).start()
    with pytest.raises(dist.DistError, match="all_gather goes on"):
        groups.exchange(work, group="weights")
    (outlasting,) = (each for each in threading.enumerate() if each.name == "wanstream-outlast")
    work.future.set_result(None)
    outlasting.join(10)
    assert not outlasting.is_alive()
    groups.exchange(work, group="weights")
