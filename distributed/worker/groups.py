"""Process groups of one worker, and the decisions that all of its group take together.

All workers of a group must call them at the same points of a run. One decision of `any_wants` took 0.20 ms between 2
processes and 0.66 ms between 4 (median of three medians of 1,000 calls, over loopback, on 2 CPU cores that were in use
by other processes too). A block of an A14B expert computes for much longer.

Every worker group is a separate torch.distributed world, in which all workers create the same process groups in the
same order. A rendezvous ends for the whole worker group when one worker leaves it; the same processes can then join the
next one, with a higher generation. A group of one worker joins immediately and opens no sockets.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from ...schema import Mesh, StateError
from ..messages import RendezvousSpec
from .rendezvous import (
    PeerLostError,
    RendezvousStore,
    WorkerTimeoutError,
    connections_since,
    format_ranks,
    is_peer_error,
    is_timeout,
    open_sockets,
    shut_down,
    use_interface_towards,
)

SIGN_OF_LIFE_S = 2.0
"""Time after a broken collective in which the other workers may still report that they are alive."""


class GroupsState(Enum):
    """State of `ProcessGroups`; it only moves forward."""

    NEW = "new"
    JOINED = "joined"
    LEFT = "left"


class ProcessGroups:
    """Process groups of one worker in one rendezvous. Ranks are those in its group."""

    def __init__(self, rendezvous: RendezvousSpec, device: torch.device) -> None:
        assert rendezvous.mesh.data == rendezvous.mesh.stage == 1, "the driver makes one group for each part and stage"
        self.rendezvous, self.device = rendezvous, device
        self.mesh, self.rank, self.size = rendezvous.mesh, rendezvous.rank, rendezvous.mesh.size
        self.gathered_bytes = 0
        """Bytes received from other workers in this rendezvous, without those of `any_wants`."""
        self.state = GroupsState.NEW
        self._lock = threading.RLock()
        self._store: RendezvousStore | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._connections: frozenset[Any] = frozenset()

    def join(self) -> None:
        """Join the rendezvous. Blocks until all workers of the group have joined.

        Raises:
            OSError: rank 0 cannot listen at the rendezvous's host and port, for example because the port is taken.
            WorkerTimeoutError: a worker did not join within the rendezvous's timeout; the message names it.
            PeerLostError: a worker joined and is gone again.
            StateError: these groups have joined or left already.
        """
        if self.state is not GroupsState.NEW:
            raise StateError(f"process groups join one rendezvous only, and these are {self.state.value}")
        if self.size > 1:
            if dist.is_initialized():
                raise StateError("this process has joined another rendezvous: leave that first")
            self._store = RendezvousStore(self.rendezvous, self._is_left)
            try:
                use_interface_towards(self.rendezvous.host, self.rendezvous.port)
                with self.translate_errors("created its process groups"):
                    self._make_groups(self._store)
            except BaseException:
                self.leave()
                raise
        with self._lock:
            if self._is_left():
                raise PeerLostError("this worker has left the rendezvous while it joined")
            self.state = GroupsState.JOINED

    def group(self, name: str) -> dist.ProcessGroup:
        """Return a process group by name.

        "control" (gloo, on the CPU) and "weights" (on the device) contain the whole worker group; "cfg", "context"
        (ring x ulysses), "ring" and "ulysses" are on the device and exist where they have two workers or more.
        """
        if self.state is not GroupsState.JOINED:
            raise StateError(f"process groups can be used between join and leave, and these are {self.state.value}")
        assert name in self._groups, f"a worker group of {self.mesh} has no process group {name!r}"
        return self._groups[name]

    def count_gathered(self, nbytes: int) -> None:
        """Add to `gathered_bytes` (any thread)."""
        with self._lock:
            self.gathered_bytes += nbytes

    def any_wants(self, wants: bool) -> bool:
        """Return True on all workers of the group if `wants` is True on one; blocks and raises as `all_reduce_max`."""
        return bool(self.all_reduce_max([wants], "waited for a decision of its group")[0])

    def check_not_left(self) -> None:
        """Raise PeerLostError if this worker has left the rendezvous, which its next collective would raise too."""
        if self._is_left():
            raise PeerLostError("this worker has left the rendezvous while it computed a step")

    def all_reduce_max(self, values: Sequence[float], doing: str) -> list[float]:
        """Return the largest of each value over the workers of the group. Blocks until all have called.

        Raises:
            WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
            PeerLostError: a worker is gone.
        """
        largest = torch.tensor(values, dtype=torch.float64)
        with self.translate_errors(doing):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group("control"))
        return [float(value) for value in largest]

    def all_gather_cpu(self, values: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """Return the `values` of every worker of the group, by group rank; all must be on the CPU and of one shape.

        Blocks and raises as `all_reduce_max`. Results computed from the list in one order are bit-equal on all workers.
        """
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        with self.translate_errors(doing):
            dist.all_gather(gathered, values.contiguous(), group=self.group("control"))
        return gathered

    @contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Translate errors of torch.distributed into WorkerTimeoutError or PeerLostError; others pass unchanged.

        Args:
            doing: verb phrase in the past tense for the message, such as "gathered weights".
        """
        try:
            yield
        except RuntimeError as err:
            if self._is_left():
                raise PeerLostError(f"this worker has left the rendezvous while it {doing}") from err
            if not is_peer_error(err):
                raise
            raise self._peer_error(doing, err) from err

    def abort_gathers(self) -> None:
        """End gathers of weights that wait, here and on the other workers (any thread). All must leave afterwards."""
        with self._lock:
            if self.device.type != "cuda":
                shut_down(self._connections)  # of all process groups
            elif "weights" in self._groups:
                self._groups["weights"].abort()

    def leave(self) -> None:
        """End the groups (any thread). Leaving twice is allowed.

        A collective of this worker that waits raises PeerLostError in `translate_errors`; so does the next collective
        of another worker that needs this one.
        """
        with self._lock:
            self.state = GroupsState.LEFT
            # Before the groups are aborted: gloo does not return from a waiting collective until its connections break.
            shut_down(self._connections)
            if self._groups:
                from torch.distributed.distributed_c10d import _abort_process_group  # private API since torch 2.6

                self._groups.clear()
                _abort_process_group()
            self._connections, self._store = frozenset(), None

    def _is_left(self) -> bool:
        return self.state is GroupsState.LEFT

    def _make_groups(self, store: RendezvousStore) -> None:
        # Otherwise the first collective imports it, and its groups keep listening for the life of the process.
        import torch._dynamo  # noqa: F401

        timeout = timedelta(seconds=self.rendezvous.timeout_s)
        before, hook = open_sockets(), sys.excepthook
        dist.init_process_group("gloo", store=store.store, rank=self.rank, world_size=self.size, timeout=timeout)
        sys.excepthook = hook  # torch wraps it again in every rendezvous, and never unwraps it
        assert dist.group.WORLD is not None
        self._groups["control"] = dist.group.WORLD
        backend = "gloo"
        if self.device.type == "cuda":  # a `RayPool` refuses other devices than these and CPUs
            backend = "nccl"
            # Keeps the process alive when another worker is lost; by default NCCL's watchdog ends it.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for name, members in group_members(self.mesh).items():
            self._groups[name], _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend=backend)
        self._connections = connections_since(before, store)
        # No worker may leave before all have joined: the store ends with rank 0, and others may still read it.
        dist.barrier(group=self._groups["control"])

    def _peer_error(self, doing: str, error: RuntimeError) -> WorkerTimeoutError | PeerLostError:
        """Return the error to raise, which names the workers that do not report that they are alive."""
        # Breaks the collectives of workers that wait for this one, so that they report too and need not time out.
        shut_down(self._connections)
        store = self._store  # `leave` on another thread may reset it
        missing = None if store is None else store.missing("alive", SIGN_OF_LIFE_S)
        if missing is None:
            who = "rank 0, which runs the store, is gone"
        elif missing:
            who = f"no sign of {format_ranks(missing)} within {SIGN_OF_LIFE_S:g} s"
        else:
            who = "all workers of its group still respond"
        where = f"rank {self.rank} {doing}: {who}"
        if is_timeout(error):
            return WorkerTimeoutError(
                f"waited {self.rendezvous.timeout_s:g} s while {where}; end the worker that hangs, or raise timeout_s "
                f"if it is only slow ({error})"
            )
        return PeerLostError(f"the connection to another worker broke while {where} ({error})")


def group_members(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return the group ranks of each process group on the device, by name and in the order of creation."""
    ranks = range(mesh.size)
    groups = {"weights": [list(ranks)]}
    for axis in ("cfg", "ring", "ulysses"):
        if getattr(mesh, axis) > 1:
            groups[axis] = [list(group) for group in sorted({mesh.group(axis, rank) for rank in ranks})]
    tokens = mesh.ring * mesh.ulysses
    if tokens > 1:
        groups["context"] = [list(ranks[first : first + tokens]) for first in ranks[::tokens]]
    return groups
