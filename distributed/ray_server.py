"""Ray's server (its GCS), which starts and places workers. When it is gone, whatever asks it waits for ever.

Ray itself would end this process a minute after it has lost its server, with all that a user has queued here. So it is
told to wait for years, and nothing is asked of a server that does not answer.
"""

from __future__ import annotations

import socket
from typing import Any

RECONNECT = "gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting for how long a process lives without the server."""
RECONNECT_S = 10**8
ANSWER_S = 2.0
"""How long connecting to it may take."""


def server_of(ray: Any) -> str:
    """host:port of the server that this process is connected to; empty where there is none."""
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def answers(server: str) -> bool:
    """Whether something listens at that host:port."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True
