"""Availability of a Ray cluster and of its server, checked by a process that can be stopped."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

from .errors import RaySetupError

CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 40.0
NEEDS_TOKEN = (
    "a cluster that asks for a token needs the file with that token as token_file of its entry in the list of clusters"
)

JOIN = """
import sys

sys.path = [place for place in sys.path if place]  # without the folder that it is started in
import ray

try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as err:
    sys.exit(f"{err} ({err.__cause__})")
ray.shutdown()
"""


def check_answers(address: str, host: str, port: int, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Raise RaySetupError unless a Ray of this version answers at `address` and takes this process in."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as err:
        raise RaySetupError(
            f"no Ray cluster answers at {address} ({err}): start one there (ray start --head), or give the address "
            "that it has printed"
        ) from err
    try:
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise RaySetupError(
            f"what listens at {address} did not take this process in within {timeout_s:g} s: give the address of "
            f"a Ray cluster; {NEEDS_TOKEN}"
        ) from err
    if joined.returncode != 0:
        said = joined.stderr.strip().splitlines() or ["nothing"]
        raise RaySetupError(
            f"the Ray cluster at {address} does not take this process in: {NEEDS_TOKEN}. Ray says: {said[-1].strip()}"
        )


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
