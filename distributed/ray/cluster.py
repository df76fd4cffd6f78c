"""Availability of a Ray cluster, checked in a subprocess because `ray.init` has no timeout."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

from .environment import RaySetupError

CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 40.0
NEEDS_TOKEN = "a cluster that requires a token needs the path of a file with it as token_file in the list of clusters"

JOIN = """
import sys

sys.path = [folder for folder in sys.path if folder]  # without the current folder, whose files could shadow modules
import ray

try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as err:
    sys.exit(f"{err} ({err.__cause__})")
ray.shutdown()
"""


def check_cluster(address: str, host: str, port: int, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Raise RaySetupError unless a Ray of this version runs at `address` and accepts this process."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as err:
        raise RaySetupError(
            f"no Ray cluster answers at {address} ({err}): start one there (ray start --head), or set the address "
            "that it printed"
        ) from err
    try:
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise RaySetupError(
            f"the server at {address} did not accept this process within {timeout_s:g} s: set the address of a Ray "
            f"cluster; {NEEDS_TOKEN}"
        ) from err
    if joined.returncode != 0:
        lines = joined.stderr.strip().splitlines() or ["no message"]
        raise RaySetupError(
            f"the Ray cluster at {address} does not accept this process: {NEEDS_TOKEN}. Ray says: {lines[-1].strip()}"
        )


RECONNECT = "gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting for the time in seconds that a process survives without the server."""
RECONNECT_S = 10**8
"""In practice forever: otherwise Ray would end ComfyUI's process some time after the server is gone."""
LISTENING_TIMEOUT_S = 2.0


def gcs_address(ray: Any) -> str:
    """Return host:port of the server that this process is connected to; empty if it is not connected."""
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def is_listening(server: str) -> bool:
    """Return True if a process listens at host:port."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENING_TIMEOUT_S).close()
    except OSError:
        return False
    return True
