"""The process groups of one worker: who computes with it, as whom, and how they come together and part.

Every group is a torch.distributed world of its own, in which all workers make the same groups in the same order. A
rendezvous ends for all of its group when one worker leaves it; the same processes can then meet again, as the next
generation. A group of one worker needs nobody: it meets at once, and nothing listens for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from ...sampling import LOCAL_FORWARD, ParallelForward
from ...schema import Mesh, StateError
from ..messages import RendezvousSpec
from .errors import PeerLostError, WorkerTimeoutError, is_of_peers, is_timeout
from .rendezvous_store import RendezvousStore, interface_towards, worded
from .sockets import TcpSocket, connections_of, open_sockets, shut_down

ASK_S = 2.0
"""How long a worker that was let down waits for a sign of each of the others."""
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LEFT_TO_US = "0"
"""By default NCCL ends the whole process when another worker is lost."""


class GroupsState(Enum):
    """Where `ProcessGroups` are; the value completes the sentence "the groups of this worker ..."."""

    NEW = "have not met yet"
    MET = "have met"
    LEFT = "were left: meet again, with the next generation"


def meet(rendezvous: RendezvousSpec, device: torch.device | str) -> ProcessGroups:
    """Meet the other workers of the group; blocks until all of them are there. Leave the groups with `with` or `leave`.

    Raises:
        OSError: rank 0 cannot listen at the rendezvous's host and port, which may be taken.
        HungError: not all came within the rendezvous's timeout; says which.
        PeerLostError: one that came is gone again.
    """
    groups = ProcessGroups(rendezvous, torch.device(device))
    groups.meet()
    return groups


class ProcessGroups:
    """The groups of one worker in one rendezvous. All ranks are those of the mesh, all errors as of `meet`."""

    def __init__(self, rendezvous: RendezvousSpec, device: torch.device) -> None:
        mesh = rendezvous.mesh
        own = mesh.coordinates(rendezvous.rank)
        self.rendezvous, self.device = rendezvous, device
        self.ranks = mesh.worker_group(own.data, own.stage)
        """Of the group."""
        self.mesh = replace(mesh, data=1, stage=1)
        """The layout of the group alone."""
        self.place = rendezvous.rank - self.ranks[0]
        """Of this worker in its group."""
        self.gathered_bytes = 0
        """Bytes that came from other workers in this rendezvous, but for votes."""
        self._state = GroupsState.NEW
        self._lock = threading.RLock()
        self._store: RendezvousStore | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._connections: frozenset[TcpSocket] = frozenset()

    @property
    def state(self) -> GroupsState:
        return self._state

    @property
    def size(self) -> int:
        """How many workers compute one step together."""
        return self.mesh.size

    def meet(self) -> None:
        """See the function `meet`; groups meet once."""
        if self._state is not GroupsState.NEW:
            raise StateError(f"the groups of this worker {self._state.value}")
        if self.size > 1:
            if dist.is_initialized():
                raise StateError("this process is in another rendezvous, which it must leave first")
            self._store = RendezvousStore(self.rendezvous, self.ranks, self._is_left)
            try:
                with self.watched("made its groups"), interface_towards(self.rendezvous.host, self.rendezvous.port):
                    self._make_groups(self._store)
            except BaseException:
                self.leave()
                raise
        with self._lock:
            if self._is_left():
                raise PeerLostError("this worker has left the rendezvous while it met the others")
            self._state = GroupsState.MET

    def group(self, name: str) -> dist.ProcessGroup:
        """The group called "control" (gloo, always on the CPU), or on the device "weights" (both of the whole group),
        "cfg", "context" (ring x ulysses), "ring" or "ulysses"; each is there where it has two workers or more.
        """
        if self._state is not GroupsState.MET:
            raise StateError(f"the groups of this worker {self._state.value}")
        assert name in self._groups, f"a group of {self.mesh} has no group {name!r}"
        return self._groups[name]

    @property
    def control(self) -> dist.ProcessGroup:
        """See `group`."""
        return self.group("control")

    @property
    def weights(self) -> dist.ProcessGroup:
        """See `group`."""
        return self.group("weights")

    def count_gathered(self, nbytes: int) -> None:
        """Add to `gathered_bytes`; from any thread."""
        with self._lock:
            self.gathered_bytes += nbytes

    def split(self) -> ParallelForward:
        """How the passes of a run are shared in this group."""
        from .lane_split import GroupForward  # it names this class

        return LOCAL_FORWARD if self.size == 1 else GroupForward(self)

    def voting(self, wish: Callable[[], bool]) -> Callable[[], bool]:
        """A question that all workers of the group ask at the same points, and that is answered the same for all: yes
        as soon as one of them wishes it."""
        from .consensus import vote

        return wish if self.size == 1 else lambda: vote(self, wish())

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """What torch.distributed raises inside becomes HungError or PeerLostError; all else passes."""
        try:
            yield
        except RuntimeError as err:
            if self._is_left():
                raise PeerLostError(f"this worker has left the rendezvous while it {doing}") from err
            if not is_of_peers(err):
                raise
            raise self._told(doing, err) from err

    def leave(self) -> None:
        """End the groups, from any thread. Leaving twice is allowed.

        A collective that waits here raises PeerLostError, in `watched`; so does one of another worker when it comes to
        need this one.
        """
        with self._lock:
            self._state = GroupsState.LEFT
            shut_down(self._connections)
            if self._groups:
                from torch.distributed.distributed_c10d import _abort_process_group  # of torch 2.6 and later

                self._groups.clear()
                _abort_process_group()
            self._connections, self._store = frozenset(), None

    def _is_left(self) -> bool:
        return self._state is GroupsState.LEFT

    def _make_groups(self, store: RendezvousStore) -> None:
        # The first collective imports it otherwise, and the groups of that one listen as long as the process lives.
        import torch._dynamo  # noqa: F401

        patience = timedelta(seconds=self.rendezvous.timeout_s)
        before, hook = open_sockets(), sys.excepthook
        dist.init_process_group("gloo", store=store.store, rank=self.place, world_size=self.size, timeout=patience)
        sys.excepthook = hook  # torch puts one of its own around it, for every rendezvous another
        assert dist.group.WORLD is not None
        self._groups["control"] = dist.group.WORLD
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            os.environ.setdefault(NCCL_ERRORS, LEFT_TO_US)
        for name, every in group_members(self.mesh).items():
            for ranks in every:
                made = dist.new_group(list(ranks), backend="nccl" if on_gpu else "gloo", timeout=patience)
                if self.place in ranks:
                    self._groups[name] = made
        self._connections = connections_of(before, partial(store.exchange, "listens"))
        # Nobody leaves before all have met: the store goes with its keeper, and others may still read it.
        dist.barrier(group=self._groups["control"])

    def _told(self, doing: str, error: RuntimeError) -> WorkerTimeoutError | PeerLostError:
        """The error to raise, with those who give no sign of life; everybody who was let down leaves one.

        Who waits for this worker is let down first, and need not wait for as long.
        """
        shut_down(self._connections)
        store = self._store  # another thread may leave now
        missing = None if store is None else store.missing("let down", ASK_S)
        if missing is None:
            who = "rank 0, which keeps the store, is gone"
        elif missing:
            who = f"no sign of {worded(missing)} within {ASK_S:g} s"
        else:
            who = "all of its group still answer"
        where = f"rank {self.rendezvous.rank} {doing}: {who}"
        if is_timeout(error):
            return WorkerTimeoutError(
                f"waited {self.rendezvous.timeout_s:g} s while {where}; end the worker that hangs, or raise timeout_s "
                "if "
                f"it is only slow ({error})"
            )
        return PeerLostError(f"the connection to another worker broke while {where} ({error})")

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


def group_members(mesh: Mesh) -> dict[str, list[tuple[int, ...]]]:
    """The groups on the device by name, in the order in which they are made: places in the group, from 0."""
    every = range(mesh.size)
    groups = {"weights": [tuple(every)]}
    for axis in ("cfg", "ring", "ulysses"):
        if getattr(mesh, axis) > 1:
            groups[axis] = sorted({mesh.group(axis, place) for place in every})
    tokens = mesh.ring * mesh.ulysses
    if tokens > 1:
        groups["context"] = [tuple(every[first : first + tokens]) for first in every[::tokens]]
    return groups
