"""Worker rendezvous: the store, and gloo sockets that can be closed under it.

gloo cannot cancel a waiting collective, and frees groups only after the wait. `abort` and
`shutdown` of `ProcessGroupGloo` do nothing in torch 2.11 and 2.13: it inherits them, and the wait
lasts until the timeout. Shutting a connection down ends the wait immediately, as if the other
worker were gone.

Rank 0 in the group runs the store, on the rendezvous's host and on no other address. Every worker
sets a key when it joins, so that a timeout names the missing ones.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from ..messages import RendezvousSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


TIMEOUT_WORDS = ("timed out", "timeout")
"""Parts of timeout messages from gloo, NCCL and the store, in lower case."""
GLOO_PATH = "gloo"
"""Part of the source path at the start of every gloo error. gloo raises plain RuntimeErrors."""


class PeerLostError(ConnectionError):
    """Another worker in the group is gone, or this one has left.

    The groups cannot be used any more.
    """


class WorkerTimeoutError(TimeoutError):
    """Another worker in the group did not respond in time. The message names it if known."""


def is_timeout(error: BaseException) -> bool:
    """Return True if a torch.distributed error reports a timeout."""
    return any(words in str(error).lower() for words in TIMEOUT_WORDS)


def is_peer_error(error: RuntimeError) -> bool:
    """Return True if torch.distributed raised `error`, and not the computation between calls."""
    return isinstance(error, dist.DistError) or GLOO_PATH in str(error)


def open_sockets() -> frozenset[Any]:
    """Return all TCP sockets in this process, as named tuples from psutil.

    On Windows they have no descriptor.
    """
    return frozenset(psutil.Process().net_connections("tcp"))


def connections_since(before: frozenset[Any], store: RendezvousStore) -> frozenset[Any]:
    """Return new connections between workers in the group since `before`.

    Other threads may have opened sockets too. So the workers exchange their new listening ports,
    and only connections to one of these ports count.
    """
    opened = open_sockets() - before
    own_ports = {each.laddr.port for each in opened if each.status == psutil.CONN_LISTEN}
    published = store.exchange("listens", ",".join(map(str, sorted(own_ports))))
    all_ports = {int(port) for ports in published for port in ports.split(",") if port}
    return frozenset(
        each
        for each in opened
        if each.raddr and (each.laddr.port in own_ports or each.raddr.port in all_ports)
    )


def shut_down(connections: Collection[Any]) -> None:
    """Shut down the connections that are still open. Calling it twice is allowed.

    On Windows, without descriptors, it does nothing: a waiting collective lasts until the timeout.
    """
    for each in connections:
        # A duplicate of the descriptor, because closing it leaves gloo's open. gloo may have closed
        # it before.
        with suppress(OSError), socket.fromfd(each.fd, each.family, each.type) as ours:
            # Another socket may have the descriptor by now.
            if (ours.getsockname()[1], ours.getpeername()[1]) == (each.laddr.port, each.raddr.port):
                ours.shutdown(socket.SHUT_RDWR)


POLL_S = 0.05
"""Interval at which a waiting worker polls the other workers' keys, and for a stop."""
STORE_GRACE_S = 1.0
"""Extra time for rank 0. The store must outlive the others' timeout, because they read from it
who is missing."""


class RendezvousStore:
    """Store for one group in one rendezvous.

    The constructor blocks until all workers in the group have joined.

    Args:
        is_left: polled during waits. They raise PeerLostError once it returns True.

    Raises:
        OSError: this worker runs the store, and cannot listen at the rendezvous's host and port.
        WorkerTimeoutError: the store cannot be reached, or a worker in the group did not join in
            time.
    """

    def __init__(self, rendezvous: RendezvousSpec, is_left: Callable[[], bool]) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not every torch is built with it

        self._rendezvous = rendezvous
        self._ranks = range(rendezvous.mesh.size)
        self._is_left = is_left
        self._deadline = time.monotonic() + rendezvous.timeout_s
        if rendezvous.rank == 0:
            self._deadline += STORE_GRACE_S
        self._endpoint = (rendezvous.host, rendezvous.port)
        self._address = f"{rendezvous.host}:{rendezvous.port}"
        self.store = PrefixStore(f"wanstream/{rendezvous.generation}", self._connect())
        self.exchange("here", "")

    def missing(self, name: str, within_s: float) -> list[int] | None:
        """Set this worker's key, and return the ranks that have not set theirs in time.

        None: the store is gone.
        """
        try:
            return self._set_and_wait(name, "1", time.monotonic() + within_s)
        except dist.DistError:
            return None

    def exchange(self, name: str, value: str) -> list[str]:
        """Publish `value`, and return the values from all workers in the group, by rank.

        Raises:
            WorkerTimeoutError: a worker did not publish a value in time.
            PeerLostError: the store is gone.
        """
        try:
            missing = self._set_and_wait(name, value, self._deadline)
            if not missing:
                return [self.store.get(f"{name}/{rank}").decode() for rank in self._ranks]
        except dist.DistError as err:
            raise PeerLostError(
                f"the store at {self._address}, which rank 0 runs, is gone ({err})"
            ) from err
        raise WorkerTimeoutError(
            f"{format_ranks(missing)} did not join the rendezvous at {self._address} (generation "
            f"{self._rendezvous.generation}) within {self._rendezvous.timeout_s:g} s: see whether "
            "they hang, or raise timeout_s"
        )

    def _set_and_wait(self, name: str, value: str, deadline: float) -> list[int]:
        """Set this worker's key, and return the ranks that have not set theirs at the deadline."""
        self.store.set(f"{name}/{self._rendezvous.rank}", value)
        # `check` and not `wait`: the store's wait cannot be cancelled.
        while missing := [rank for rank in self._ranks if not self.store.check([f"{name}/{rank}"])]:
            if time.monotonic() >= deadline:
                break
            self._pause()
        return missing

    def _connect(self) -> TCPStore:
        """Serve the store as rank 0; connect to it as another rank."""
        from torch._C._distributed_c10d import TCPStore

        is_master = self._rendezvous.rank == 0
        if not is_master:
            self._wait_for_server()
        try:
            return TCPStore(
                *self._endpoint,
                is_master=is_master,
                timeout=timedelta(seconds=max(self._remaining_s(), 1)),
                # `exchange` waits instead. It can be cancelled, and names missing workers.
                wait_for_workers=False,
                master_listen_fd=self._listen() if is_master else None,
            )
        except dist.DistError as err:
            kind = WorkerTimeoutError if is_timeout(err) else PeerLostError
            raise kind(
                f"the store at {self._address}, which rank 0 runs, does not respond: {err}"
            ) from err

    def _wait_for_server(self) -> None:
        """Poll until the store listens. TCPStore can wait too, but its wait cannot be cancelled."""
        while True:
            try:
                socket.create_connection(self._endpoint, timeout=self._remaining_s()).close()
                return
            except OSError as err:
                if self._remaining_s() <= POLL_S:
                    raise WorkerTimeoutError(
                        f"no store responds at {self._address} after "
                        f"{self._rendezvous.timeout_s:g} s ({err}): see whether rank 0, which runs "
                        "it, is alive, and whether this machine reaches that address"
                    ) from err
                self._pause()

    def _listen(self) -> int:
        """Return the descriptor of a listening socket.

        TCPStore itself would listen on all interfaces.
        """
        host, port = self._endpoint
        try:
            # TCPStore closes the descriptor itself, so the socket object must not.
            return socket.create_server(self._endpoint, family=_family(host), backlog=1024).detach()
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise OSError(
                    errno.EADDRINUSE, f"port {port} at {host} is taken: use another port"
                ) from err
            raise

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), POLL_S)

    def _pause(self) -> None:
        if self._is_left():
            raise PeerLostError(
                f"this worker has left the rendezvous at {self._address} while it waited for others"
            )
        time.sleep(POLL_S)


def use_interface_towards(host: str, port: int) -> None:
    """Make gloo and NCCL listen only on the interface towards `host` (loopback for loopback).

    Variables set by the user or by an earlier rendezvous in this process are kept. NCCL reads the
    variable at the first connection, after the rendezvous.
    """
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:  # connecting UDP sends no packet
        probe.connect((host, port))
        source = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if source in {each.address for each in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 2" or "ranks 2 and 3"."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
