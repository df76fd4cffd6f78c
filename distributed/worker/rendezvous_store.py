"""The store in which the workers of a group find each other: rank 0 of the mesh keeps it, the others reach it there.

It listens on the host that the rendezvous names and nowhere else. Every worker leaves a mark when it comes, so that
those
who wait can say who is missing.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch.distributed as dist

from ..messages import RendezvousSpec
from .errors import PeerLostError, WorkerTimeoutError, is_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOK_S = 0.05
"""How often a worker that waits looks whether somebody came, and whether it should still wait."""
KEEPER_S = 1.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class RendezvousStore:
    """The store of one group in one rendezvous. Opening it blocks until the store answers.

    Args:
        should_end: asked while this waits; where it answers True, PeerLostError is raised.

    Raises:
        OSError: this worker keeps the store, and cannot listen at the rendezvous's host and port.
        HungError: nobody keeps the store, or not all of the group came in time.
    """

    def __init__(self, rendezvous: RendezvousSpec, ranks: Sequence[int], should_end: Callable[[], bool]) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not every torch is built with it

        self._rendezvous, self._ranks, self._should_end = rendezvous, ranks, should_end
        # The keeper stays a little longer, so that the others can still see who is missing.
        self._deadline = time.monotonic() + rendezvous.timeout_s + (KEEPER_S if rendezvous.rank == 0 else 0)
        self._place = f"{rendezvous.host}:{rendezvous.port}"
        if rendezvous.rank == 0:
            store = self._listening()
        else:
            self._wait_for_keeper()
            store = self._store(keeps=False)
        self.store = PrefixStore(f"wanstream/{rendezvous.generation}/{ranks[0]}", store)
        self.exchange("here", "")

    def missing(self, mark: str, within_s: float) -> list[int] | None:
        """Leave this worker's mark, and tell which of its group have not left theirs; None: the store is gone."""
        try:
            self.store.set(_key(mark, self._rendezvous.rank), "1")
            return self._wait_for(mark, time.monotonic() + within_s)
        except dist.DistError:
            return None

    def exchange(self, mark: str, said: str) -> list[str]:
        """What every worker of the group says; raises HungError where not all do."""
        try:
            self.store.set(_key(mark, self._rendezvous.rank), said)
            missing = self._wait_for(mark, self._deadline)
            if not missing:
                return [self.store.get(_key(mark, rank)).decode() for rank in self._ranks]
        except dist.DistError as err:
            raise PeerLostError(f"the store at {self._place}, which rank 0 keeps, is gone ({err})") from err
        raise WorkerTimeoutError(
            f"{worded(missing)} did not come to the rendezvous at {self._place} "
            f"(generation {self._rendezvous.generation}) "
            f"within {self._rendezvous.timeout_s:g} s: see what they do, or raise timeout_s"
        )

    def _wait_for(self, mark: str, deadline: float) -> list[int]:
        """Those who have not left `mark` at the deadline."""
        missing = list(self._ranks)
        while True:
            missing = [rank for rank in missing if not self.store.check([_key(mark, rank)])]
            if not missing or time.monotonic() >= deadline:
                return missing
            self._pause()

    def _wait_for_keeper(self) -> None:
        """Until somebody listens there: the store's own waiting cannot be ended."""
        while True:
            try:
                socket.create_connection((self._rendezvous.host, self._rendezvous.port), timeout=self._left()).close()
            except OSError as err:
                if self._left() <= LOOK_S:
                    raise WorkerTimeoutError(
                        f"no store answers at {self._place} after {self._rendezvous.timeout_s:g} s ({err}): "
                        "rank 0 keeps "
                        "it; see whether that worker runs, and whether this machine reaches that address"
                    ) from err
                self._pause()
            else:
                return

    def _listening(self) -> TCPStore:
        family = socket.AF_INET6 if ":" in self._rendezvous.host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self._rendezvous.host, self._rendezvous.port), family=family, backlog=1024
            )
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise OSError(
                    errno.EADDRINUSE,
                    f"port {self._rendezvous.port} at {self._rendezvous.host} is taken: meet at another one",
                ) from err
            raise
        return self._store(keeps=True, listening=listening.detach())

    def _store(self, *, keeps: bool, listening: int | None = None) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore

        try:
            return TCPStore(
                self._rendezvous.host,
                self._rendezvous.port,
                is_master=keeps,
                timeout=timedelta(seconds=max(self._left(), 1)),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
        except dist.DistError as err:
            kind = WorkerTimeoutError if is_timeout(err) else PeerLostError
            raise kind(f"the store at {self._place}, which rank 0 keeps, does not answer: {err}") from err

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), LOOK_S)

    def _pause(self) -> None:
        if self._should_end():
            raise PeerLostError(f"this worker has left the rendezvous at {self._place} while it waited for the others")
        time.sleep(LOOK_S)


@contextmanager
def interface_towards(host: str, port: int) -> Iterator[None]:
    """While this lasts, gloo and NCCL listen only where this machine reaches `host`: on loopback, if that is loopback.

    What the user has set stays. NCCL looks when it first connects, so that its setting is not taken back.
    """
    name = _interface(host, port)
    if name is None:
        yield
        return
    os.environ.setdefault(NCCL_INTERFACE, name)
    if GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def worded(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 2 and 3"."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _interface(host: str, port: int) -> str | None:
    """The network interface that packets to `host` leave by; None where that cannot be told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, port))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    return None


def _key(mark: str, rank: int) -> str:
    return f"{mark}/{rank}"
