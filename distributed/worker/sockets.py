"""The connections that gloo opens, found so that they can be closed under it.

gloo cannot end a collective that waits: its groups are freed when the wait is over, one way or the other. A connection
that is shut down ends it at once, as if the other worker were gone.
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

OPEN_FILES = Path("/dev/fd")
"""Of this process, by number; not there on Windows, where a collective that waits lasts until its timeout."""


class TcpSocket(NamedTuple):
    """An open socket of this process."""

    number: int
    """Of its file."""
    port: int
    peer_port: int | None
    """None of one that is not connected."""
    listens: bool


def open_sockets() -> frozenset[TcpSocket]:
    """All TCP sockets of this process."""
    return frozenset(_open_sockets())


def connections_of(before: Collection[TcpSocket], exchange: Callable[[str], list[str]]) -> frozenset[TcpSocket]:
    """Those that were opened since to, or by, workers of the same group.

    Other threads may have opened some too, so every worker says where it listens since: `exchange` gives what all said.
    """
    opened = open_sockets() - frozenset(before)
    own = {each.port for each in opened if each.listens}
    said = exchange(",".join(map(str, sorted(own))))
    every = {int(port) for ports in said for port in ports.split(",") if port}
    return frozenset(each for each in opened if not each.listens and (each.port in own or each.peer_port in every))


def shut_down(connections: Collection[TcpSocket]) -> None:
    """End those of them that are still open. Ending twice is allowed."""
    for each in connections:
        with suppress(OSError), _opened(each.number) as ours:  # which gloo, or the other side, may have closed
            if _described(each.number, ours) == each:
                ours.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[TcpSocket]:
    for name in os.listdir(OPEN_FILES) if OPEN_FILES.exists() else ():
        with suppress(OSError), _opened(int(name)) as ours:  # no socket, or closed in the meantime
            if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
                yield _described(int(name), ours)


def _described(number: int, ours: socket.socket) -> TcpSocket:
    listens = bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return TcpSocket(number, ours.getsockname()[1], _peer_port(ours), listens)


def _peer_port(ours: socket.socket) -> int | None:
    try:
        return int(ours.getpeername()[1])
    except OSError:
        return None


def _opened(number: int) -> socket.socket:
    """The same socket under another number, so that closing ours closes nothing. Raises OSError where there is none."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, f"file {number} is no socket")
    return socket.socket(fileno=os.dup(number))
