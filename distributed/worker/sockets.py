"""Discovery of the connections that gloo opens, so that they can be shut down.

gloo cannot cancel a collective that waits, and its groups are freed only after the wait. Shutting a connection down
ends the wait immediately, as if the other worker were gone.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FD_FOLDER = Path("/dev/fd")
"""Open files of this process; missing on Windows, where a waiting collective lasts until its timeout."""


class TcpSocket(NamedTuple):
    """An open socket of this process."""

    fd: int
    """File descriptor."""
    port: int
    peer_port: int | None
    """None if the socket is not connected."""
    listens: bool


def open_sockets() -> frozenset[TcpSocket]:
    """Return all TCP sockets of this process."""
    return frozenset(_open_sockets())


def connections_of(before: Collection[TcpSocket], exchange: Callable[[str], list[str]]) -> frozenset[TcpSocket]:
    """Return the connections between workers of the group that were opened since `before`.

    Other threads may have opened sockets too. So `exchange` sends the new listening ports of this worker and returns
    those of all workers, and only connections to one of these ports count.
    """
    opened = open_sockets() - frozenset(before)
    own_ports = {each.port for each in opened if each.listens}
    published = exchange(",".join(map(str, sorted(own_ports))))
    all_ports = {int(port) for ports in published for port in ports.split(",") if port}
    return frozenset(
        each for each in opened if not each.listens and (each.port in own_ports or each.peer_port in all_ports)
    )


def shut_down(connections: Collection[TcpSocket]) -> None:
    """Shut down the connections that are still open. Calling it twice is allowed."""
    for each in connections:
        with suppress(OSError), _duplicate(each.fd) as ours:  # gloo, or the peer, may have closed it
            # The descriptor may have been reused for another socket since.
            if _describe(each.fd, ours) == each:
                ours.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[TcpSocket]:
    for name in os.listdir(FD_FOLDER) if FD_FOLDER.exists() else ():
        with suppress(OSError), _duplicate(int(name)) as ours:  # not a socket, or closed since
            if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
                yield _describe(int(name), ours)


def _describe(fd: int, ours: socket.socket) -> TcpSocket:
    listens = bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return TcpSocket(fd, ours.getsockname()[1], _peer_port(ours), listens)


def _peer_port(ours: socket.socket) -> int | None:
    try:
        return int(ours.getpeername()[1])
    except OSError:
        return None


def _duplicate(fd: int) -> socket.socket:
    """Return the socket under another descriptor, so that closing it leaves the original open. Raises OSError."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, f"file {fd} is not a socket")
    return socket.socket(fileno=os.dup(fd))
