"""The connection of this process to Ray: one, shared by all pools, and ended with the last of them if we made it."""

from __future__ import annotations

import atexit
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ...schema import LOCAL, WorkersRef, host_and_port, is_loopback
from ..transport.threads import WorkThread
from ..worker.worker import LOOPBACK
from .cluster import RECONNECT, RECONNECT_S, answers, check_answers, server_of
from .environment import PREFIX, forget_token, import_ray, on_loopback, own_ray, quiet, settings, token_of_cluster
from .errors import LateRayletError, RaySetupError
from .reaper import RayWatch

CPU_SLOT = 0.5
"""Of a machine without GPUs, what Ray counts for one worker; it only counts."""
LOCAL_CPUS = 16
"""What a Ray of ours counts for this machine."""
OBJECT_STORE_BYTES = 1 << 30
"""Room for what is told after steps: five tensors of 19 MB for a sample of 1280x720x81."""
FOLDER = "wanstream-ray-"


class RayConnection:
    """This process's connection to Ray. It can have one, whoever made it; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._address = self._server = ""
        self._undo = ExitStack()
        self._watch: RayWatch | None = None

    def enter(self, ref: WorkersRef, *, store_bytes: int = OBJECT_STORE_BYTES) -> Any:
        """The module `ray`, connected as `ref` says; every `enter` has its `leave`.

        Raises:
            RayMissingError: Ray is not installed.
            RaySetupError: the cluster does not answer, or this process is connected to another Ray.
        """
        with self._lock:
            ray = import_ray()
            if self._users == 0:
                self._undo = self._connected(ray, ref, store_bytes)
                self._address, self._server = ref.address, server_of(ray)
            elif self._address != ref.address:
                raise RaySetupError(
                    f"this process has workers at {self._address}, and can have others at {ref.address} only when "
                    "those are closed"
                )
            self._users += 1
            return ray

    def is_there(self) -> bool:
        """True while this process is connected to the same Ray, its server answers and this machine is part of it.

        A server can outlive the raylet of this machine, without which no worker starts here.
        """
        ray, watch = import_ray(), self._watch
        if server_of(ray) != self._server or not answers(self._server):
            return False
        if watch is not None and not watch.raylet_lives():
            return False
        own = ray.get_runtime_context().get_node_id()
        try:
            return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own)
        except ray.exceptions.RayError:  # the server has ended just now
            return False

    def look(self) -> None:
        """Note which processes Ray has started by now, to end them when this one is gone."""
        with self._lock:
            if self._watch is not None:
                self._watch.look()

    def leave(self) -> None:
        """One pool less; with the last one, what `enter` has started ends with all its processes."""
        with self._lock:
            assert self._users > 0, "left more often than entered"
            self._users -= 1
            if self._users == 0:
                self._watch = None
                self._undo.close()

    def _connected(self, ray: Any, ref: WorkersRef, store_bytes: int) -> ExitStack:
        """A connection, and what undoes it."""
        if ray.is_initialized():
            _check_joinable(str(ray.get_runtime_context().gcs_address), ref.address)
            return ExitStack()
        with ExitStack() as undo:
            # The kernel ends Ray's processes with the *thread* that started them.
            thread = WorkThread("wanstream ray")
            undo.callback(thread.close)
            undo.callback(forget_token)
            start = _start_local if ref.address == LOCAL else _join_cluster
            self._watch = thread.submit(start, ray, ref, store_bytes, undo).result()
            atexit.register(self._end_at_exit)
            undo.callback(atexit.unregister, self._end_at_exit)
            return undo.pop_all()

    def _end_at_exit(self) -> None:
        self._undo.close()


CONNECTION = RayConnection()


def _start_local(ray: Any, ref: WorkersRef, store_bytes: int, undo: ExitStack) -> RayWatch:
    """Start a Ray on this machine, with a second try where its raylet was late; `undo` gets what ends it."""
    try:
        return _try_local(ray, store_bytes, undo)
    except LateRayletError:
        return _try_local(ray, store_bytes, undo)


def _try_local(ray: Any, store_bytes: int, undo: ExitStack) -> RayWatch:
    with ExitStack() as attempt:
        watch = _started(ray, store_bytes, attempt)
        undo.push(attempt.pop_all())
        return watch


def _started(ray: Any, store_bytes: int, undo: ExitStack) -> RayWatch:
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    except OSError as err:
        raise _not_started(ray, err) from err
    watch = RayWatch(folder)
    undo.callback(watch.close)
    undo.callback(ray.shutdown)
    with own_ray():
        try:
            ray.init(
                address="local",
                num_cpus=LOCAL_CPUS,
                num_gpus=torch.cuda.device_count(),
                object_store_memory=store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address=LOOPBACK,
                # Ray opens its own folder to all users; the one around it stays closed to them. A short name, as paths
                # of sockets have at most 107 bytes.
                _temp_dir=str(folder / "r"),
                _system_config={"prestart_worker_first_driver": False, RECONNECT: RECONNECT_S},
            )
        except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as err:
            raise _not_started(ray, err) from err
        except Exception as err:
            raise LateRayletError(str(_not_started(ray, err))) from err
        finally:
            watch.look()  # Ray leaves behind what it has started before it failed
    return watch


def _not_started(ray: Any, error: Exception) -> RaySetupError:
    said = str(error).rstrip(".")
    return RaySetupError(
        f"Ray {ray.__version__} does not start on this machine: {said}. See that disk, RAM and shared memory have "
        "room, and that the folder for temporary files (TMPDIR) is there, has a short name and can be written to"
    )


def _join_cluster(ray: Any, ref: WorkersRef, store_bytes: int, undo: ExitStack) -> None:
    host, port = host_and_port(ref.address)
    with (
        on_loopback() if is_loopback(host) else quiet(),
        settings({f"{PREFIX}{RECONNECT}": str(RECONNECT_S)}),
        token_of_cluster(ref.token_file),
    ):
        check_answers(ref.address, host, port)
        undo.callback(ray.shutdown)
        try:
            ray.init(address=ref.address, log_to_driver=False, configure_logging=False)
        except Exception as err:
            raise RaySetupError(f"Ray {ray.__version__} cannot join the cluster at {ref.address}: {err}") from err


def _check_joinable(connected: str, asked: str) -> None:
    if asked != connected:
        raise RaySetupError(
            f"this process is connected to the Ray at {connected} already, by another node pack or script, and can "
            f"have only one: add {connected} to the list of clusters to use that, or end it first"
        )
