"""Connection from this process to Ray, and a reaper for our Ray when this process is gone.

The kernel ends the processes started by Ray from here, and these end their workers. But two of
Ray's agents would run for another minute and try to report the loss to a server that is gone too.
Ray 2.60 has no setting for this time.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from ...devices import core_count, gpu_count
from ...schema import LOOPBACK, is_loopback
from ...schema.refs import LOCAL, WorkersRef
from ..clusters import host_and_port
from ..transport.threads import WorkThread
from . import environment

CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 40.0
NEEDS_TOKEN = (
    "a cluster that requires a token needs the path of a file with it as token_file in the list of "
    "clusters"
)

SAFE_PATH = "import sys; sys.path = [folder for folder in sys.path if folder]"
"""Start of a script: leaves out the current folder, as PYTHONSAFEPATH does, because other users
may write there."""
JOIN = f"""{SAFE_PATH}
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as err:
    sys.exit(f"{{err}} ({{err.__cause__}})")
ray.shutdown()
"""


def check_cluster(address: str, host: str, port: int, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Raise RaySetupError unless Ray in this version runs at `address` and accepts this process."""
    # First without Ray: a missing server is found in seconds.
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as err:
        raise environment.RaySetupError(
            f"no Ray cluster answers at {address} ({err}): start one there (ray start --head), or "
            "set the address that it printed"
        ) from err
    try:
        # In another process, because `ray.init` cannot be stopped after a timeout.
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise environment.RaySetupError(
            f"the server at {address} did not accept this process within {timeout_s:g} s: set the "
            f"address of a Ray cluster; {NEEDS_TOKEN}"
        ) from err
    if joined.returncode != 0:
        lines = joined.stderr.strip().splitlines() or ["no message"]
        raise environment.RaySetupError(
            f"the Ray cluster at {address} does not accept this process: {NEEDS_TOKEN}. Ray says: "
            f"{lines[-1].strip()}"
        )


RECONNECT = "gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting for the seconds without a server before a process ends."""
RECONNECT_S = 10**8
"""In practice forever: otherwise Ray would end ComfyUI's process some time after the server is
gone."""
LISTENING_TIMEOUT_S = 2.0


def gcs_address(ray: Any) -> str:
    """Return host:port of this process's server.

    Empty without a connection.
    """
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def is_listening(host: str, port: int) -> bool:
    """Return True if a process listens at this port."""
    with suppress(OSError), socket.create_connection((host, port), timeout=LISTENING_TIMEOUT_S):
        return True
    return False


END_TIMEOUT_S = 20.0

REAPER = f"""{SAFE_PATH}
import shutil
from contextlib import suppress
import psutil
tracked = []
for line in sys.stdin:
    with suppress(psutil.NoSuchProcess):
        tracked.append(psutil.Process(int(line)))
for process in tracked:
    with suppress(psutil.NoSuchProcess):
        process.kill()
psutil.wait_procs(tracked, timeout=10)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class RayReaper:
    """Reaper for a Ray started by this process with files in `folder`.

    Removes the folder at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The pipe closes however this process ends. Then the reaper ends Ray's processes.
        self._process = subprocess.Popen(
            [sys.executable, "-c", REAPER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder.parent,
            start_new_session=True,  # Ctrl-C in a terminal must not end the reaper
            text=True,
        )

    def track(self) -> None:
        """Send the ids of Ray's present processes to the reaper.

        Sending one twice is allowed.
        """
        pipe = self._process.stdin
        assert pipe is not None
        # Only children with the folder in their command: ComfyUI and other packs have processes
        # too.
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if child.pid != self._process.pid and any(
                    str(self._folder) in word for word in child.cmdline()
                ):
                    pipe.writelines(
                        f"{each.pid}\n" for each in (child, *child.children(recursive=True))
                    )
        pipe.flush()

    def close(self) -> None:
        """End the tracked processes now."""
        self._process.communicate(timeout=END_TIMEOUT_S)


CPU_SLOT = 0.5
"""CPU resource for one worker on a machine without GPUs. Ray uses it for bookkeeping only."""
LOCAL_CPUS = 16
"""CPU resource of a local Ray, unless the machine has more cores."""
OBJECT_STORE_BYTES = 1 << 30
"""Object store size: 77 MB for a state at 1280x720x81, 36 MB for a request. Ray spills more to
disk."""
FOLDER_PREFIX = "wanstream-ray-"


class RayConnection:
    """Connection from this process to Ray. A process can have only one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.address = self._server = ""
        """Address of the present, or last, Ray as in `WorkersRef`, and host:port of the server."""
        self._undo = ExitStack()
        self._reaper: RayReaper | None = None

    def acquire(self, ref: WorkersRef, *, store_bytes: int = OBJECT_STORE_BYTES) -> Any:
        """Connect as set in `ref`, and return the module `ray`.

        Each call needs a call to `release`.

        Raises:
            RayMissingError: Ray is not installed.
            RaySetupError: the cluster does not respond, or this process is connected to another
                Ray.
        """
        with self._lock:
            ray = environment.import_ray()
            if self._users == 0:
                with ExitStack() as undo:
                    self._connect(ray, ref, store_bytes, undo)
                    self.address = ref.address
                    self._server = gcs_address(ray)
                    self._undo = undo.pop_all()
                # For a process that ends without `release`.
                atexit.register(self._undo.close)
            elif self.address != ref.address:
                raise environment.RaySetupError(
                    f"this process has workers at {self.address}: close those before starting "
                    f"others at {ref.address}"
                )
            self._users += 1
            return ray

    def is_alive(self) -> bool:
        """Return True if this process is connected to the same Ray, and it runs here.

        Ray's server and this machine's raylet must both run. The server can outlive the raylet, and
        without the raylet no worker starts here.
        """
        ray = environment.import_ray()
        if gcs_address(ray) != self._server or not is_listening(*host_and_port(self._server)):
            return False
        node_id = ray.get_runtime_context().get_node_id()
        with suppress(ray.exceptions.RayError):  # the server ended after the check above
            raylets = [node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]]
            # Connect to it as well, because the server takes some seconds to miss a killed raylet.
            return any(
                is_listening(node["NodeManagerAddress"], node["NodeManagerPort"])
                for node in raylets
            )
        return False

    def has_ended(self) -> bool:
        """Return True if this Ray has ended.

        Always False for a server on another machine, because the network may only be down.
        """
        return is_loopback(host_and_port(self._server)[0]) and not self.is_alive()

    def track_processes(self) -> None:
        """Record Ray's processes, for the reaper to end after this one is gone."""
        with self._lock:
            if self._reaper is not None:
                self._reaper.track()

    def release(self) -> None:
        """Release one `acquire`.

        The last one closes the connection, and ends a local Ray.
        """
        with self._lock:
            assert self._users > 0, "released more often than acquired"
            self._users -= 1
            if self._users == 0:
                self._reaper = None
                atexit.unregister(self._undo.close)
                self._undo.close()

    def _connect(self, ray: Any, ref: WorkersRef, store_bytes: int, undo: ExitStack) -> None:
        """Connect, unless this process is already connected to the same Ray.

        Registers the cleanup in `undo`.
        """
        if ray.is_initialized():
            if (connected := gcs_address(ray)) != ref.address:
                raise environment.RaySetupError(
                    f"this process is connected to the Ray at {connected} already, by another node "
                    f"pack or script, and can have only one connection: add {connected} to the "
                    "list of clusters to use it, or close it first"
                )
            return
        # Ray's processes make the kernel end them with their parent *thread*, so it must live as
        # long as they do.
        thread = WorkThread("wanstream ray")
        undo.callback(thread.close)
        undo.callback(environment.reset_token_cache)
        start = _start_local if ref.address == LOCAL else _join_cluster
        starting = thread.submit(start, ray, ref, store_bytes, undo)
        try:
            self._reaper = starting.result()
        finally:
            wait([starting])  # after Ctrl-C, too: else `undo` would miss what is started later


CONNECTION = RayConnection()


def _start_local(ray: Any, ref: WorkersRef, store_bytes: int, undo: ExitStack) -> RayReaper:
    """Start a Ray on this machine, and try again once if the raylet was late.

    Registers the cleanup in `undo`.
    """
    with suppress(environment.LateRayletError), ExitStack() as first:
        reaper = _init_local(ray, store_bytes, first)
        undo.push(first.pop_all())
        return reaper
    return _init_local(ray, store_bytes, undo)


def _init_local(ray: Any, store_bytes: int, undo: ExitStack) -> RayReaper:
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        # Registered before `shutdown`, so it runs later and ends the processes left by `shutdown`.
        reaper = RayReaper(folder)
        undo.callback(reaper.close)
        undo.callback(ray.shutdown)
        with environment.local_ray_environment(), ExitStack() as started:
            # Also after an error: `ray.init` does not end the processes it has started.
            started.callback(reaper.track)
            ray.init(
                address="local",
                num_cpus=max(LOCAL_CPUS, core_count()),
                num_gpus=gpu_count(),
                object_store_memory=store_bytes,
                # Without the dashboard and logs: fewer processes, and no output of workers in
                # ComfyUI's console.
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address=LOOPBACK,
                # All users can access Ray's folder. The parent, made by mkdtemp, is private. The
                # name is short because socket paths have at most 107 bytes.
                _temp_dir=str(folder / "r"),
                # No idle workers in advance: every actor gets a process when it starts.
                _system_config={"prestart_worker_first_driver": False, RECONNECT: RECONNECT_S},
            )
    except Exception as err:
        # Ray raises a bare Exception if the raylet is late.
        is_final = isinstance(err, ray.exceptions.RayError | RuntimeError | OSError | ValueError)
        reason = str(err).rstrip(".")
        raise (environment.RaySetupError if is_final else environment.LateRayletError)(
            f"Ray {ray.__version__} does not start on this machine: {reason}. Check that disk, RAM "
            "and shared memory have free space, and that the folder for temporary files (TMPDIR) "
            "exists, has a short name and is writable"
        ) from err
    return reaper


def _join_cluster(ray: Any, ref: WorkersRef, store_bytes: int, undo: ExitStack) -> None:
    host, port = host_and_port(ref.address)
    with (
        environment.on_loopback() if is_loopback(host) else environment.quiet_logging(),
        environment.temporary_environment({f"{environment.PREFIX}{RECONNECT}": str(RECONNECT_S)}),
        environment.token_of_cluster(ref.token_file),
    ):
        check_cluster(ref.address, host, port)
        undo.callback(ray.shutdown)
        try:
            ray.init(address=ref.address, log_to_driver=False, configure_logging=False)
        except Exception as err:
            raise environment.RaySetupError(
                f"Ray {ray.__version__} cannot join the cluster at {ref.address}: {err}"
            ) from err
