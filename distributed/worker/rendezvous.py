"""Rendezvous of the workers of a group: the store, and the sockets of gloo that can be closed under it.

gloo cannot cancel a collective that waits, and its groups are freed only after the wait. `abort` and `shutdown` of
`ProcessGroupGloo` do nothing in torch 2.11 and 2.13: it inherits them, and the wait lasts until its timeout. Shutting a
connection down ends the wait immediately, as if the other worker were gone.

Rank 0 of the group runs it, on the host of the rendezvous and on no other address. Every worker sets a key when it
joins, so that a timeout names the missing ones.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from ..messages import RendezvousSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


TIMEOUT_WORDS = ("timed out", "timeout")
"""Parts of the timeout messages of gloo, NCCL and the store, in lower case."""
GLOO_PATH = "gloo"
"""Part of the source path at the start of every gloo error; gloo raises plain RuntimeErrors."""


class PeerLostError(ConnectionError):
    """Another worker of the group is gone, or this one has left; the groups cannot be used any more."""


class WorkerTimeoutError(TimeoutError):
    """Another worker of the group did not respond in time; the message names it if it is known."""


def is_timeout(error: BaseException) -> bool:
    """Return True if an error of torch.distributed reports a timeout."""
    message = str(error).lower()
    return any(words in message for words in TIMEOUT_WORDS)


def is_peer_error(error: RuntimeError) -> bool:
    """Return True if `error` was raised by torch.distributed, and not by the computation between its calls."""
    return isinstance(error, dist.DistError) or GLOO_PATH in str(error)


def open_sockets() -> frozenset[Any]:
    """Return all TCP sockets of this process, as named tuples of psutil. On Windows they have no descriptor."""
    return frozenset(psutil.Process().net_connections("tcp"))


def connections_of(before: Collection[Any], exchange: Callable[[str], list[str]]) -> frozenset[Any]:
    """Return the connections between workers of the group that were opened since `before`.

    Other threads may have opened sockets too. So `exchange` sends the new listening ports of this worker and returns
    those of all workers, and only connections to one of these ports count.
    """
    opened = open_sockets() - frozenset(before)
    own_ports = {each.laddr.port for each in opened if each.status == psutil.CONN_LISTEN}
    published = exchange(",".join(map(str, sorted(own_ports))))
    all_ports = {int(port) for ports in published for port in ports.split(",") if port}
    return frozenset(
        each for each in opened if each.raddr and (each.laddr.port in own_ports or each.raddr.port in all_ports)
    )


def shut_down(connections: Collection[Any]) -> None:
    """Shut down the connections that are still open. Calling it twice is allowed.

    Without descriptors, on Windows, it does nothing: a waiting collective lasts until its timeout.
    """
    for each in connections:
        # A duplicate of the descriptor, because closing it leaves that of gloo open. gloo may have closed it before.
        with suppress(OSError), socket.fromfd(each.fd, each.family, each.type) as ours:
            # The descriptor may have been reused for another socket since.
            if (ours.getsockname()[1], ours.getpeername()[1]) == (each.laddr.port, each.raddr.port):
                ours.shutdown(socket.SHUT_RDWR)


POLL_S = 0.05
"""Interval at which a waiting worker polls the keys of the others, and whether it should stop waiting."""
STORE_GRACE_S = 1.0
"""Extra time for rank 0: the store must outlive the timeout of the others, which read from it who is missing."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class RendezvousStore:
    """Store of one group in one rendezvous. The constructor blocks until all workers of the group have joined.

    Args:
        is_left: polled while this waits; PeerLostError is raised once it returns True.

    Raises:
        OSError: this worker runs the store, and cannot listen at the rendezvous's host and port.
        WorkerTimeoutError: the store cannot be reached, or a worker of the group did not join in time.
    """

    def __init__(self, rendezvous: RendezvousSpec, is_left: Callable[[], bool]) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not every torch is built with it

        self._rendezvous, self._ranks, self._is_left = rendezvous, range(rendezvous.mesh.size), is_left
        self._deadline = time.monotonic() + rendezvous.timeout_s + (STORE_GRACE_S if rendezvous.rank == 0 else 0)
        self._address = f"{rendezvous.host}:{rendezvous.port}"
        listening = self._listen() if rendezvous.rank == 0 else None
        if listening is None:
            self._wait_for_server()
        self.store = PrefixStore(f"wanstream/{rendezvous.generation}", self._store(listening))
        self.exchange("here", "")

    def missing(self, name: str, within_s: float) -> list[int] | None:
        """Set this worker's key, and return the ranks that have not set theirs in time; None: the store is gone."""
        try:
            self.store.set(_key(name, self._rendezvous.rank), "1")
            return self._wait_for(name, time.monotonic() + within_s)
        except dist.DistError:
            return None

    def exchange(self, name: str, value: str) -> list[str]:
        """Publish `value`, and return the values of all workers of the group, by rank.

        Raises:
            WorkerTimeoutError: a worker did not publish its value in time.
            PeerLostError: the store is gone.
        """
        try:
            self.store.set(_key(name, self._rendezvous.rank), value)
            missing = self._wait_for(name, self._deadline)
            if not missing:
                return [self.store.get(_key(name, rank)).decode() for rank in self._ranks]
        except dist.DistError as err:
            raise PeerLostError(f"the store at {self._address}, which rank 0 runs, is gone ({err})") from err
        raise WorkerTimeoutError(
            f"{format_ranks(missing)} did not join the rendezvous at {self._address} "
            f"(generation {self._rendezvous.generation}) within {self._rendezvous.timeout_s:g} s: see whether they "
            "hang, or raise timeout_s"
        )

    def _wait_for(self, name: str, deadline: float) -> list[int]:
        """Return the ranks that have not set the key `name` at the deadline."""
        missing = list(self._ranks)
        while True:
            missing = [rank for rank in missing if not self.store.check([_key(name, rank)])]
            if not missing or time.monotonic() >= deadline:
                return missing
            self._pause()

    def _wait_for_server(self) -> None:
        """Poll until the store listens. TCPStore can wait too, but its wait cannot be cancelled."""
        address = (self._rendezvous.host, self._rendezvous.port)
        while True:
            try:
                socket.create_connection(address, timeout=self._remaining_s()).close()
                return
            except OSError as err:
                if self._remaining_s() <= POLL_S:
                    raise WorkerTimeoutError(
                        f"no store responds at {self._address} after {self._rendezvous.timeout_s:g} s ({err}): see "
                        "whether rank 0, which runs it, is alive, and whether this machine reaches that address"
                    ) from err
                self._pause()

    def _listen(self) -> int:
        """Return the descriptor of a socket that listens."""
        family = socket.AF_INET6 if ":" in self._rendezvous.host else socket.AF_INET
        try:
            # Bound here, because TCPStore itself would listen on all interfaces.
            listening = socket.create_server(
                (self._rendezvous.host, self._rendezvous.port), family=family, backlog=1024
            )
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise OSError(
                    errno.EADDRINUSE,
                    f"port {self._rendezvous.port} at {self._rendezvous.host} is taken: use another port",
                ) from err
            raise
        return listening.detach()

    def _store(self, listening: int | None) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore

        try:
            return TCPStore(
                self._rendezvous.host,
                self._rendezvous.port,
                is_master=listening is not None,
                timeout=timedelta(seconds=max(self._remaining_s(), 1)),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
        except dist.DistError as err:
            kind = WorkerTimeoutError if is_timeout(err) else PeerLostError
            raise kind(f"the store at {self._address}, which rank 0 runs, does not respond: {err}") from err

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), POLL_S)

    def _pause(self) -> None:
        if self._is_left():
            raise PeerLostError(f"this worker has left the rendezvous at {self._address} while it waited for others")
        time.sleep(POLL_S)


@contextmanager
def interface_towards(host: str, port: int) -> Iterator[None]:
    """Make gloo and NCCL listen only on the interface towards `host`: on loopback, if `host` is loopback.

    Variables that the user has set are kept. The one of NCCL is not removed, because NCCL reads it when it first
    connects, which is after this context.
    """
    name, is_set = _interface(host, port), GLOO_INTERFACE in os.environ
    if name is not None:
        for variable in (NCCL_INTERFACE, GLOO_INTERFACE):
            os.environ.setdefault(variable, name)
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(GLOO_INTERFACE, None)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 2" or "ranks 2 and 3"."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _interface(host: str, port: int) -> str | None:
    """Return the network interface of the route to `host`; None if it is not known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting UDP sends no packet
        probe.connect((host, port))
        source = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, addresses in interfaces if source in {each.address for each in addresses}), None)


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"
