"""Shards of weights brought together over the `weights` group of a rendezvous."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from ...offload import GatherBrokenError
from ..worker.groups import GroupsState, ProcessGroups

SAID_BYTES = 64


class GroupGather:
    """See `Gather`. All workers of a group hold the shards of the same blocks, by their place in the group.

    A gather on a CPU that is left cannot be taken back: gloo waits for the others until they come or part, and ending
    the group waits for gloo. So what it uses is kept by a thread of its own until then, and this worker leaves the
    rendezvous meanwhile, by which the others learn of it.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        # The groups of torch are asked for each time: who keeps one keeps its connections open.
        self._groups = groups
        self.rank, self.size = groups.place, groups.size
        self._aborted = False
        self._wake = threading.Event()

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """See `Gather.compare`. Raises HungError and PeerLostError, as everything that workers do together."""
        assert len(said) <= SAID_BYTES, f"{len(said)} bytes are compared"
        own = torch.tensor(list(said.ljust(SAID_BYTES, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size)]
        with self._groups.watched("compared what is to be streamed"):
            dist.all_gather(every, own, group=self._groups.control)
        return tuple(bytes(one.tolist())[: len(said)] for one in every)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`. Raises HungError and PeerLostError too."""
        with self._groups.watched("gathered weights"):
            group = self._groups.weights
            if self._aborted:
                raise GatherBrokenError("the gathers of this rendezvous were ended")
            work = _issue(into, own, group)
            if own.is_cuda:
                work.wait()  # by the current stream
            else:
                self._wait_on_host(work, [into, own, group])
        self._groups.count_gathered(into.numel() - own.numel())

    def abort(self) -> None:
        """See `Gather.abort`."""
        self._aborted = True
        self._wake.set()
        if self._groups.device.type == "cuda" and self._groups.state is GroupsState.MET:
            self._groups.weights.abort()

    def _wait_on_host(self, work: Any, used: list[Any]) -> None:
        ended = threading.Event()

        def tell(_: object) -> None:
            ended.set()
            self._wake.set()

        work.get_future().add_done_callback(tell)
        self._wake.wait()
        if not self._aborted:
            self._wake.clear()
        if not ended.is_set():
            # Not freed by gloo's own thread, which its group would wait for.
            threading.Thread(
                target=_keep, args=(ended, [work, *used]), name="wanstream-gather-left", daemon=True
            ).start()
            raise GatherBrokenError("a run has ended while its weights were gathered")
        work.wait()  # raises what has ended it


def _issue(into: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    # Its name since torch 2.13, which warns of the other one.
    issue = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return issue(into, own, group=group, async_op=True)


def _keep(ended: threading.Event, used: list[Any]) -> None:
    ended.wait()
    used.clear()
