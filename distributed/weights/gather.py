"""Gathering of weight shards over the `weights` process group of a rendezvous."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from ...offload import GatherBrokenError
from ..worker.groups import GroupsState, ProcessGroups

COMPARED_BYTES = 64


class GroupGather:
    """See `Gather`. Each worker of a group has one shard of every block, by its group rank.

    A gather on a CPU cannot be cancelled: gloo waits until the other workers call or leave, and destroying the group
    waits for gloo. So after an abort a thread keeps the tensors and the group alive until gloo returns. This worker
    leaves the rendezvous, which ends the gather on the other workers.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        # Process groups are looked up for each call: a reference to one would keep its connections open.
        self._groups = groups
        self.rank, self.size = groups.group_rank, groups.size
        self._aborted = False
        self._wake = threading.Event()

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """See `Gather.compare`. Raises WorkerTimeoutError and PeerLostError."""
        assert len(said) <= COMPARED_BYTES, f"{len(said)} bytes to compare, at most {COMPARED_BYTES}"
        own = torch.tensor(list(said.ljust(COMPARED_BYTES, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with self._groups.translate_errors("compared the blocks to be streamed"):
            dist.all_gather(gathered, own, group=self._groups.control)
        return tuple(bytes(one.tolist())[: len(said)] for one in gathered)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`. Raises WorkerTimeoutError and PeerLostError too."""
        with self._groups.translate_errors("gathered weights"):
            group = self._groups.weights
            if self._aborted:
                raise GatherBrokenError("the gathers of this rendezvous were aborted")
            work = _issue(into, own, group)
            if own.is_cuda:
                work.wait()  # makes the current stream wait, not the host
            else:
                self._wait_on_host(work, [into, own, group])
        self._groups.count_gathered(into.numel() - own.numel())

    def abort(self) -> None:
        """See `Gather.abort`."""
        self._aborted = True
        self._wake.set()
        if self._groups.device.type == "cuda" and self._groups.state is GroupsState.JOINED:
            self._groups.weights.abort()

    def _wait_on_host(self, work: Any, used: list[Any]) -> None:
        ended = threading.Event()

        def on_done(_: object) -> None:
            ended.set()
            self._wake.set()

        # An event instead of `work.wait()`, which could not be interrupted by `abort`.
        work.get_future().add_done_callback(on_done)
        self._wake.wait()
        if not self._aborted:
            self._wake.clear()
        if not ended.is_set():
            # gloo's thread must not drop the last reference to the group, because freeing the group joins that thread.
            threading.Thread(
                target=_hold_until_done, args=(ended, [work, *used]), name="wanstream-aborted-gather", daemon=True
            ).start()
            raise GatherBrokenError("the run ended while its weights were gathered")
        work.wait()  # raises the error of a gather that failed


def _issue(into: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed it, and warns about the old name.
    issue = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return issue(into, own, group=group, async_op=True)


def _hold_until_done(ended: threading.Event, used: list[Any]) -> None:
    ended.wait()
    used.clear()
