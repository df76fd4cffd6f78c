"""Process groups for one worker, and decisions by the whole group.

All workers in a group must call them at the same points in a run. One `any_wants` decision took
0.20 ms between 2 processes and 0.66 ms between 4 (median of three medians over 1,000 calls, over
loopback, on 2 CPU cores with other processes running). A block in an A14B expert computes for much
longer.

Every worker group is a separate torch.distributed world. All workers in it create the same process
groups in the same order. A rendezvous ends for the whole worker group when one worker leaves it.
The same processes can then join the next one, with a higher generation. A group with one worker
joins immediately and opens no sockets.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from ...schema import Mesh, StateError
from ..messages import RendezvousSpec
from .rendezvous import (
    POLL_S,
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
"""Time after a broken collective in which the other workers may still report as alive."""


BROKEN_GRACE_S = 0.5
"""Time for gloo to end a collective with broken connections, if it ends it at all."""


class GroupsState(Enum):
    """State of `ProcessGroups`. It only moves forward."""

    NEW = "new"
    JOINED = "joined"
    LEFT = "left"


class ProcessGroups:
    """Process groups for one worker in one rendezvous. Ranks are group ranks."""

    def __init__(self, rendezvous: RendezvousSpec, device: torch.device) -> None:
        assert rendezvous.mesh.data == rendezvous.mesh.stage == 1, (
            "the driver makes one group for each part and stage"
        )
        self.rendezvous = rendezvous
        self.device = device
        self.mesh = rendezvous.mesh
        self.rank = rendezvous.rank
        self.size = rendezvous.mesh.size
        self.gathered_bytes = 0
        """Bytes received from other workers in this rendezvous, without `any_wants`."""
        self.state = GroupsState.NEW
        self._lock = threading.RLock()
        self._store: RendezvousStore | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._connections: frozenset[Any] = frozenset()
        self._is_broken = False

    def join(self) -> None:
        """Join the rendezvous. Blocks until all workers in the group have joined.

        Raises:
            OSError: rank 0 cannot listen at the rendezvous's host and port, for example because the
                port is taken.
            WorkerTimeoutError: a worker did not join within the rendezvous's timeout; the message
                names it.
            PeerLostError: a worker joined and is gone again.
            StateError: these groups have joined or left already.
        """
        if self.state is not GroupsState.NEW:
            raise StateError(
                f"process groups join one rendezvous only, and these are {self.state.value}"
            )
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
        # Under the lock, because `leave` may run on another thread meanwhile.
        with self._lock:
            if self._is_left():
                raise PeerLostError("this worker has left the rendezvous while it joined")
            self.state = GroupsState.JOINED

    def group(self, name: str) -> dist.ProcessGroup:
        """Return a process group by name.

        "control" (gloo, on the CPU) and "weights" (on the device) contain the whole worker group.
        "cfg", "context" (ring x ulysses), "ring" and "ulysses" are on the device. They exist where
        they have two workers or more.
        """
        if self.state is not GroupsState.JOINED:
            raise StateError(
                "process groups can be used between join and leave, and these are "
                f"{self.state.value}"
            )
        assert name in self._groups, f"a worker group of {self.mesh} has no process group {name!r}"
        return self._groups[name]

    def count_gathered(self, nbytes: int) -> None:
        """Add to `gathered_bytes` (any thread)."""
        with self._lock:
            self.gathered_bytes += nbytes

    def any_wants(self, wants: bool) -> bool:
        """Return True on all workers in the group if `wants` is True on one.

        Blocks and raises as `all_reduce_max`.
        """
        return bool(self.all_reduce_max([wants], "waited for a decision of its group")[0])

    def check_not_left(self) -> None:
        """Raise PeerLostError if this worker has left the rendezvous.

        The worker's next collective would raise it too.
        """
        if self._is_left():
            raise PeerLostError("this worker has left the rendezvous while it computed a step")

    def all_reduce_max(self, values: Sequence[float], doing: str) -> list[float]:
        """Return the largest of each value over the group's workers.

        Blocks until all have called.

        Raises:
            WorkerTimeoutError: a worker did not call within the rendezvous's timeout.
            PeerLostError: a worker is gone.
        """
        # float64 holds byte counts up to 2^53 exactly. float32 would round them.
        largest = torch.tensor(values, dtype=torch.float64)
        with self.translate_errors(doing):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group("control"))
        return [float(value) for value in largest]

    def all_gather_cpu(self, values: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """Return the `values` from every worker in the group, by group rank.

        All must be on the CPU and have one shape. Blocks and raises as `all_reduce_max`. Results
        computed from the list in one order are bit-equal on all workers.
        """
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        with self.translate_errors(doing):
            dist.all_gather(gathered, values.contiguous(), group=self.group("control"))
        return gathered

    @contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Translate torch.distributed errors into WorkerTimeoutError or PeerLostError.

        Others pass unchanged.

        Args:
            doing: verb phrase in the past tense for the message, such as "gathered weights".
        """
        try:
            yield
        except RuntimeError as err:
            if self._is_left():
                raise PeerLostError(
                    f"this worker has left the rendezvous while it {doing}"
                ) from err
            if not is_peer_error(err):
                raise
            raise self._peer_error(doing, err) from err

    def exchange(self, collective: Callable[..., Any], *tensors: Any, group: str) -> None:
        """Run a torch.distributed collective with large tensors in the process group `group`.

        On CPUs it ends at the latest when the connections end. After a break, gloo forgets a partly
        written send (`Pair` in gloo/transport/tcp signals the buffers of all other operations), and
        the collective lasts until the timeout. This method then leaves the collective behind, with
        the tensors. Exchanges inside diffusers (ring, Ulysses) do not come here, and wait for the
        timeout in this case.

        Raises:
            RuntimeError: the collective failed, or connections broke.
        """
        among = self.group(group)
        # NCCL does not wait on the host, and `abort` ends its collectives.
        if self.device.type == "cuda":
            collective(*tensors, group=among)
            return
        work = collective(*tensors, group=among, async_op=True)
        ended = threading.Event()
        # Polled through an event, because `work.wait` cannot be cancelled.
        work.get_future().add_done_callback(lambda _: ended.set())
        while not ended.wait(POLL_S):
            if self._is_broken and not ended.wait(BROKEN_GRACE_S):
                outlasting = threading.Thread(
                    target=_outlast, args=(work, among), name="wanstream-outlast", daemon=True
                )
                outlasting.start()
                raise dist.DistError(f"its connections broke, and {collective.__name__} goes on")
        # It has ended: raises an error, if any.
        work.wait()

    def abort_gathers(self) -> None:
        """End waiting weight gathers, here and on the other workers (any thread).

        All must leave afterwards.
        """
        with self._lock:
            if self.device.type != "cuda":
                self._break_connections()  # in all process groups
            elif "weights" in self._groups:
                self._groups["weights"].abort()

    def leave(self) -> None:
        """End the groups (any thread). Leaving twice is allowed.

        A waiting collective in this worker raises PeerLostError in `translate_errors`. So does the
        next collective in another worker that needs this one.
        """
        with self._lock:
            self.state = GroupsState.LEFT
            # Before the abort: gloo does not return from a waiting collective until connections
            # break.
            self._break_connections()
            if self._groups:
                # Private API since torch 2.6.
                from torch.distributed.distributed_c10d import _abort_process_group

                self._groups.clear()
                _abort_process_group()
            self._connections = frozenset()
            self._store = None

    def _break_connections(self) -> None:
        self._is_broken = True
        shut_down(self._connections)

    def _is_left(self) -> bool:
        return self.state is GroupsState.LEFT

    def _make_groups(self, store: RendezvousStore) -> None:
        # Otherwise the first collective imports it, and the groups in use then keep listening as
        # long as the process lives.
        import torch._dynamo  # noqa: F401

        timeout = timedelta(seconds=self.rendezvous.timeout_s)
        # The sockets are found by comparison, because gloo does not expose them.
        before = open_sockets()
        hook = sys.excepthook
        dist.init_process_group(
            "gloo", store=store.store, rank=self.rank, world_size=self.size, timeout=timeout
        )
        sys.excepthook = hook  # torch wraps it again in every rendezvous, and never unwraps it
        assert dist.group.WORLD is not None
        self._groups["control"] = dist.group.WORLD
        backend = "gloo"
        if self.device.type == "cuda":  # a `RayPool` refuses devices other than these and CPUs
            backend = "nccl"
            # Keeps the process alive when another worker is lost. By default NCCL's watchdog ends
            # it.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for name, members in group_members(self.mesh).items():
            self._groups[name], _ = dist.new_subgroups_by_enumeration(
                members, timeout=timeout, backend=backend
            )
        self._connections = connections_since(before, store)
        # No worker may leave before all have joined: the store ends with rank 0, and others may
        # still read it.
        dist.barrier(group=self._groups["control"])

    def _peer_error(self, doing: str, error: RuntimeError) -> WorkerTimeoutError | PeerLostError:
        """Return the error to raise, with the names of workers that do not report as alive."""
        # Breaks the collectives of workers that wait for this one. They report too, and need not
        # time out.
        self._break_connections()
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
                f"waited {self.rendezvous.timeout_s:g} s while {where}; end the worker that hangs, "
                f"or raise timeout_s if it is only slow ({error})"
            )
        return PeerLostError(f"the connection to another worker broke while {where} ({error})")


def _outlast(work: dist.Work, _group: dist.ProcessGroup) -> None:
    """Keep a process group until the collective ends: deleting it would wait for the collective."""
    # Its error has no reader: `exchange` has raised already.
    with suppress(RuntimeError):
        work.wait()


def group_members(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return each process group's ranks on the device, by name in creation order."""
    ranks = range(mesh.size)
    groups = {"weights": [list(ranks)]}
    for axis in ("cfg", "ring", "ulysses"):
        if getattr(mesh, axis) > 1:
            groups[axis] = [
                list(group) for group in sorted({mesh.group(axis, rank) for rank in ranks})
            ]
    tokens = mesh.ring * mesh.ulysses
    if tokens > 1:
        groups["context"] = [list(ranks[first : first + tokens]) for first in ranks[::tokens]]
    return groups
