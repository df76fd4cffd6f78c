"""Pool of workers behind Ray, with one handle each."""

from __future__ import annotations

import platform
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ...offload import sweep
from ...sampling.inputs import DenoiseRequest
from ...schema import Mesh, is_loopback
from ...schema.refs import LOCAL, WorkersError, WorkersRef
from ..clusters import check_address
from ..messages import RunTask, TaskResult, WorkerFacts, package_versions
from ..path_map import places
from ..plan.machines import nested_sizes
from ..transport.pool import OnReport, WorkerLostError
from ..transport.threads import run_in_thread, settle
from .actor import FOLDER, PACKAGE, RestartedError, Service, Started, actor_class
from .connection import CONNECTION, OBJECT_STORE_BYTES
from .environment import LostAtStartError, RaySetupError
from .placement import Placement

TAIL_LINES = 30
OF_RAY = (":job_id:", ":actor_name:", ":task_name:")


class RayWorkerHandle:
    """See `WorkerHandle`.

    `shared` has Ray's references to requests in the object store, by `id`.
    """

    def __init__(
        self, ray: Any, shared: Mapping[int, Any], actor: Any, rank: int, started: Started
    ) -> None:
        self._ray = ray
        self._shared = shared
        self._actor = actor
        self.rank = rank
        self._lock = threading.Lock()
        self._killed = False
        self._processes: list[psutil.Process] = []
        """The worker's process, if it runs on the driver's machine."""
        self.restarted(started)

    def restarted(self, started: Started) -> None:
        """Set the process report. After a restart by Ray it is another process."""
        self.started = started
        self._processes = []
        # psutil sees processes on this machine only.
        if started.facts.machine == self._ray.get_runtime_context().get_node_id():
            with suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(started.facts.pid))

    def call(self, method: str, *args: Any) -> Future[Any]:
        """See `WorkerHandle.call`."""
        future: Future[Any] = Future()
        try:
            answer = self._remote(lambda actor: actor.call.remote(method, args).future())
        except WorkerLostError as err:
            future.set_exception(err)
        else:
            answer.add_done_callback(lambda answered: settle(future, self._result_of, answered))
        return future

    def serve(self, method: str, *args: Any) -> Future[Any]:
        """Call a short method of the `Service`, as `call`.

        After a loss every call fails until `restarted`. The values have built-in types, because a
        new process unpickles them before it imports this pack.
        """
        return self.call("serve", self.started.process, method, args)

    def run(self, task: RunTask, on_report: OnReport) -> Future[TaskResult]:
        """See `WorkerHandle.run`."""
        return run_in_thread(f"wanstream worker {self.rank}", self._run, task, on_report)

    def log_tail(self) -> str:
        """See `WorkerHandle.log_tail`. Also empty for a log on another machine."""
        files = [Path(name) for name in self.started.logs]
        return "\n".join(filter(None, (tail(file) for file in files if file.is_file())))

    def kill(self) -> None:
        """See `WorkerHandle.kill`.

        Ray ends the process, after a few seconds by force if it does not react.
        """
        with self._lock:
            # Without a connection, `ray.kill` would start Ray again.
            if not self._killed and self._ray.is_initialized():
                self._ray.kill(self._actor)
            self._killed = True

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until a process on this machine is gone, and the memory with it."""
        for process in self._processes:
            if not CONNECTION.is_alive():  # without Ray, nothing else ends it
                with suppress(psutil.Error):
                    process.kill()
        psutil.wait_procs(self._processes, timeout=timeout_s)

    def has_ray(self) -> bool:
        """Return False if Ray has ended and will not start it again."""
        return not CONNECTION.has_ended()

    def _remote(self, call: Callable[[Any], Any]) -> Any:
        """Return `call(actor)`. Raises WorkerLostError if the worker was ended from here."""
        with self._lock:
            # Without a connection, Ray would start once more, with none of our settings.
            if self._killed or not self._ray.is_initialized():
                raise self._lost("it was ended from here")
            return call(self._actor)

    def _run(self, task: RunTask, on_report: OnReport) -> TaskResult:
        # A separate argument: Ray replaces a reference by the value there, and not inside other
        # arguments.
        request = self._shared.get(id(task.request), task.request)
        rest = replace(task, request=None)  # type: ignore[arg-type]
        messages = self._remote(lambda actor: actor.run.remote(rest, request))
        try:
            for message in messages:
                report = self._ray.get(message)
                if isinstance(report, TaskResult):
                    return report
                try:
                    on_report(report)
                except BaseException:
                    # Otherwise the worker would compute to the end, although nobody waits for it.
                    self.call("stop", task.run_id)
                    raise
        except self._ray.exceptions.RayError as err:
            raise self._worded(err) from err
        raise self._lost("its run ended without a result")

    def _result_of(self, answered: Future[Any]) -> Any:
        try:
            return answered.result()
        except self._ray.exceptions.RayError as err:
            raise self._worded(err) from err

    def _worded(self, error: Exception) -> Exception:
        """Return the worker's own error for one from Ray, or WorkerLostError."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, RestartedError):
                return self._lost("Ray has started another process for it")
            if isinstance(cause, Exception):
                return cause
            return RuntimeError(str(error))
        if isinstance(error, self._ray.exceptions.UnserializableException):
            # The error's class cannot be created again from the arguments.
            return RuntimeError(str(error))
        if self._killed:
            return self._lost("it was ended from here")
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return self._lost("it has ended or cannot be reached")  # before Ray has found the cause
        return self._lost(describe_exit(str(error)))

    def _lost(self, how: str) -> WorkerLostError:
        facts = self.started.facts
        said = self.log_tail()
        where = (
            f"worker {self.rank} (process {facts.pid} on {facts.node}, {facts.device}) is gone: "
            f"{how}"
        )
        # A local Ray removes the logs when it ends.
        logs = "" if CONNECTION.address == LOCAL else " and ".join(self.started.logs)
        if said:
            where += f"\nThe end of its log{logs and f' ({logs})'}:\n{said}"
        elif logs and not Path(self.started.logs[0]).exists():
            where += f"; its log on {facts.node} is {logs}"
        return WorkerLostError(where, self.rank)


def describe_exit(message: str) -> str:
    """Describe a process's end by the detail in Ray's message, without general remarks."""
    detail = message.split("Worker exit detail:", 1)[-1].split("Some common causes")[0]
    return " ".join(detail.split()) or "for an unknown reason"


def tail(file: Path) -> str:
    """Return the last lines of a log, without Ray's own lines."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        own = (line for line in lines if not line.startswith(OF_RAY))
        return "".join(deque(own, maxlen=TAIL_LINES)).strip()


START_TIMEOUT_S = 180.0
"""Timeout for starting all workers. They import torch at the same time."""
END_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 5.0
TOKEN_HINT = (
    " Check that every machine of the cluster started Ray with RAY_AUTH_MODE=token and the same "
    "token: workers without it cannot connect to this process"
)


class RayPool(AbstractContextManager["RayPool"]):
    """Pool with `ref.count` workers; see `Pool`.

    The constructor blocks until all are ready. Use with `with` or `close`.

    Each group in `ref.mesh` is on one machine where it fits. Without a mesh, all workers are, if
    possible. The workers can be used in any other layout, too, but groups may then be apart.

    Args:
        device: device for local workers: "cuda" for one GPU each, "cpu", or "" for GPUs if the
            machine has any. Workers in a cluster use GPUs if it has any, unless they have a
            service.
        service: an object in each process. After a loss, Ray restarts it on a machine with a free
            slot.
        store_bytes: size of Ray's object store for the workers' reports.

    Raises:
        RayMissingError: Ray is not installed.
        RaySetupError: there are fewer GPUs or CPU slots than workers, a cluster does not respond or
            is open to other machines without a token, this process has another Ray, or workers do
            not start within `start_timeout_s`.
        VersionsError: a worker has another version of WanStream, torch, diffusers or Python.
        WorkersError: the address does not fit `beyond_loopback` or `token_file`, or workers cannot
            use the device.
    """

    def __init__(
        self,
        ref: WorkersRef,
        device: str = "",
        *,
        service: Service | None = None,
        store_bytes: int = OBJECT_STORE_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        assert ref.count >= 1, ref
        check_address(ref)
        if device not in ("", "cpu", "cuda"):
            raise WorkersError(
                "workers compute on CUDA devices or CPUs, which NCCL and gloo connect, and this is "
                f"{device}: compute without workers"
            )
        self._ref = ref
        self._timeout_s = start_timeout_s
        self._service = service
        self._closed = False
        # One lock per rank, so that lost workers are replaced side by side.
        self._replacing = [threading.Lock() for _ in range(ref.count)]
        self._failed: set[int] = set()
        """Ranks whose last worker was lost and not replaced."""
        self._starting: set[Any] = set()
        """Actors before they are ready. `close` ends them."""
        self._shared: dict[int, Any] = {}
        with ExitStack() as undo:
            undo.callback(sweep)  # runs last: removes shared memory of killed workers
            self._ray = CONNECTION.acquire(ref, store_bytes=store_bytes)
            undo.callback(CONNECTION.release)
            on_gpus = None
            if device and (ref.address == LOCAL or service is not None):
                on_gpus = device == "cuda"
            sizes = nested_sizes(ref.mesh or Mesh(ulysses=ref.count))
            self._placement = Placement(
                self._ray, ref.count, start_timeout_s, sizes=sizes, on_gpus=on_gpus
            )
            undo.callback(self._placement.close)
            self._class = actor_class(self._ray)
            self._workers = self._start(range(ref.count))
            self._undo = undo.pop_all()

    @property
    def usable(self) -> bool:
        """See `Pool.usable`."""
        return not self._closed and not self._failed and CONNECTION.is_alive()

    @property
    def workers(self) -> Sequence[RayWorkerHandle]:
        """See `Pool.workers`."""
        return tuple(self._workers)

    @contextmanager
    def share(self, requests: Sequence[DenoiseRequest]) -> Iterator[None]:
        """See `Pool.share`. Ray's object store keeps the requests until the context ends."""
        self._check_open()  # a call after Ray's end would start Ray again
        try:
            # Tasks carry these same objects, and the caller keeps them alive, so ids are enough.
            self._shared.update((id(request), self._ray.put(request)) for request in requests)
            yield
        finally:
            self._shared.clear()

    def replace(self, rank: int) -> RayWorkerHandle:
        """See `Pool.replace`.

        Raises as `RayPool` if the new worker does not start, or after `close`.
        """
        with self._replacing[rank]:
            self._workers[rank].kill()
            # Before the start, so that the new worker finds the memory free.
            self._workers[rank].wait_for_end(END_TIMEOUT_S)
            self._failed.add(rank)
            (self._workers[rank],) = self._start([rank])
            self._failed.discard(rank)
            return self._workers[rank]

    def close(self) -> None:
        """See `Pool.close`. Cancels replacements on other threads."""
        self._closed = True
        # Before the locks: a replacement holds one until the worker starts.
        self._kill(tuple(self._starting))
        with ExitStack() as replaced:
            for lock in self._replacing:
                replaced.enter_context(lock)
            # Workers on other machines release their shared memory. `sweep` covers this machine
            # only.
            if CONNECTION.is_alive():  # else the calls wait for it
                wait([worker.call("close") for worker in self._workers], timeout=CLOSE_TIMEOUT_S)
            # All at once, and only then the waits: each process takes seconds to end.
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.wait_for_end(END_TIMEOUT_S)
            self._undo.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ranks: Sequence[int]) -> list[RayWorkerHandle]:
        """Start the workers with these ranks.

        Starts again after a loss, once on the same machines, and as long as Ray assigns other ones.
        The system may have ended a worker because RAM was short. Ray notices a lost machine late,
        so it may first place a worker there.
        """
        until = time.monotonic() + self._timeout_s
        tried = 0
        while True:
            self._check_open()  # a call after Ray's end would start Ray again
            nodes = [self._placement.node_of(rank) for rank in ranks]
            try:
                return self._start_once(ranks)
            except LostAtStartError:
                tried += 1
                same_nodes = None not in nodes and nodes == [
                    self._placement.node_of(rank) for rank in ranks
                ]
                if tried > 1 and (same_nodes or time.monotonic() > until):
                    raise

    def _start_once(self, ranks: Sequence[int]) -> list[RayWorkerHandle]:
        """Start the workers with these ranks at the same time.

        After an error none is left.
        """
        folders = [str(folder) for folder in places(FOLDER, self._ref.paths)]
        actors = [self._actor(rank, folders) for rank in ranks]
        with ExitStack() as undo:
            undo.callback(self._kill, actors)
            ready = [actor.call.remote("started", ()) for actor in actors]
            undo.callback(self._starting.difference_update, actors)
            self._starting.update(actors)
            # Again: `close` on another thread may have missed the actors added just now.
            self._check_open()
            until = time.monotonic() + self._timeout_s  # one deadline for all workers
            started = [
                self._wait_ready(rank, answer, until)
                for rank, answer in zip(ranks, ready, strict=True)
            ]
            self._starting.difference_update(actors)
            CONNECTION.track_processes()
            check_versions(package_versions(), [each.facts for each in started])
            check_exposure(started, beyond_loopback=self._ref.beyond_loopback)
            undo.pop_all()
        return [
            RayWorkerHandle(self._ray, self._shared, *each)
            for each in zip(actors, ranks, started, strict=True)
        ]

    def _actor(self, rank: int, folders: Sequence[str]) -> Any:
        options = self._placement.options(rank)
        if self._service is not None:
            # Ray does not repeat a lost call. The caller decides.
            options |= {"max_restarts": -1, "max_task_retries": 0}
        settings = {
            "threads": self._ref.threads,
            "workers_on_machine": self._placement.workers_on_machine_of(rank),
            "service": self._service,
        }
        return self._class.options(**options).remote(PACKAGE, list(folders), settings)

    def _check_open(self) -> None:
        if self._closed:
            raise RaySetupError("the pool was closed while a worker was replaced: start a new one")
        if not CONNECTION.is_alive():
            raise RaySetupError(
                f"the Ray at {self._ref.address} has ended or cannot be reached, and its workers "
                "are lost: start it, then run again"
            )

    def _kill(self, actors: Sequence[Any]) -> None:
        # A call after Ray's end would start Ray again, without our settings.
        if self._ray.is_initialized():
            for actor in actors:
                self._ray.kill(actor)

    def _wait_ready(self, rank: int, answer: Any, until: float) -> Started:
        errors = self._ray.exceptions
        try:
            started: Started = self._ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except errors.GetTimeoutError as err:
            raise RaySetupError(
                f"worker {rank} did not start within {self._timeout_s:g} s: "
                f"{self._placement.describe_delay(rank)}"
            ) from err
        except errors.RayActorError as err:
            raise LostAtStartError(
                f"worker {rank} does not start: "
                f"{describe_exit(str(err))}{TOKEN_HINT if self._ref.token_file else ''}"
            ) from err
        except errors.RayError as err:
            # The worker's own error is the cause of Ray's error.
            raise RaySetupError(
                f"worker {rank} does not start: {getattr(err, 'cause', None) or err}"
            ) from err
        return started


def check_exposure(workers: Sequence[Started], *, beyond_loopback: bool) -> None:
    """Raise RaySetupError for workers that other machines reach without permission or token.

    The permission is `beyond_loopback`.
    """
    outside = [started for started in workers if not is_loopback(started.facts.address)]
    if outside and not beyond_loopback:
        raise RaySetupError(
            f"workers of this cluster listen on {outside[0].facts.address}, which other machines "
            "reach: set remote_machines to true in its entry to allow it, or start Ray with "
            "--node-ip-address 127.0.0.1"
        )
    if any(not started.requires_token for started in outside):
        raise RaySetupError(
            f"the cluster listens on {outside[0].facts.address} and requires no token: anyone who "
            "reaches it can run programs there. Start it with RAY_AUTH_MODE=token (ray "
            "get-auth-token --generate), and set that file as token_file in its entry"
        )


class VersionsError(ValueError):
    """A worker's versions differ from the driver's. The message has both."""


def check_versions(driver: Mapping[str, str], workers: Sequence[WorkerFacts]) -> None:
    """Raise VersionsError if the versions of a worker differ from the driver's.

    `workers` are in rank order. WanStream must be the same version. Torch, diffusers and Python
    must agree in the first two numbers.
    """
    wrong = []
    for rank, worker in enumerate(workers):
        for name, ours in driver.items():
            theirs = worker.versions[name]
            if theirs != ours and (name == "WanStream" or series(theirs) != series(ours)):
                wrong.append(
                    f"worker {rank} on {worker.node} has {name} {theirs}, the driver on "
                    f"{platform.node()} has {name} {ours}"
                )
    if wrong:
        raise VersionsError("; ".join(wrong) + ": install the same versions on all machines")


def series(version: str) -> str:
    """Return "2.13" for "2.13.1+cu130".

    The version itself if it does not start with two numbers.
    """
    return re.sub(r"^(\d+\.\d+).*", r"\1", version)
