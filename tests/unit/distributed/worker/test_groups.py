"""Collectives never ended by torch.distributed."""

import threading

import pytest
import torch
import torch.distributed as dist

from wanstream.distributed.worker.groups import GroupsState, ProcessGroups
from wanstream.distributed.worker.weights import GroupGather
from wanstream.offload import GatherBrokenError
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


def test_gather_ends_with_its_connections(monkeypatch):
    groups = ProcessGroups(rendezvous(Mesh(cfg=2))[0], torch.device("cpu"))
    groups.state = GroupsState.JOINED
    groups._groups = {"weights": dist.group.WORLD}
    work = Unfinished()
    monkeypatch.setattr(dist, "all_gather_single", work, raising=False)
    gather = GroupGather(groups)
    threading.Timer(0.1, gather.abort).start()
    with pytest.raises(GatherBrokenError, match="the run ended while its weights were gathered"):
        gather.all_gather(torch.zeros(2), torch.zeros(1))
    (outlasting,) = (each for each in threading.enumerate() if each.name == "wanstream-outlast")
    work.future.set_result(None)
    outlasting.join(10)
    assert not outlasting.is_alive()
    groups.exchange(work, group="weights")
