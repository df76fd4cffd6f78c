"""Worker side of Ray: an actor around a `Worker`. Its class is pickled by value and imports this pack in its process.

The pack is imported there under the name that it has here, so that its classes can be pickled in both directions;
ComfyUI names a pack after its folder.
"""

from __future__ import annotations

import os
import pkgutil
import queue
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...devices import core_count
from ...sampling import DenoiseRequest
from ..messages import RunTask, StepReport, TaskResult, WorkerFacts
from ..transport.threads import WorkThread
from ..worker.worker import Worker
from .environment import import_ray


@dataclass(frozen=True, kw_only=True)
class Started:
    """Report of a worker's process that is ready."""

    facts: WorkerFacts
    logs: tuple[str, ...]
    """Log files on its machine, with its stdout and stderr."""
    requires_token: bool
    """True if Ray requires a token there."""
    process: str
    """Identifier of the process. Ray restarts an actor in another one, without an error if no call was running."""


class RestartedError(RuntimeError):
    """The call was meant for an earlier process of this actor."""


Service: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Object that runs in the process of each worker: its class, as `module:name` below this pack, and its settings.

The class is called with the device of its process, the number of processes on its machine, and the settings as keyword
arguments of built-in types: they are unpickled before the pack is imported there. Ray restarts a process that was lost,
with a new object.
"""


class RayWorker(Worker):
    """Worker in a process that Ray has started.

    Args:
        threads: CPU threads to compute with; None: the cores of this machine divided by its number of workers.
        workers_on_machine: number of workers on this machine.
        service: its service, which `serve` calls, if it has one.
    """

    def __init__(self, *, threads: int | None, workers_on_machine: int, service: Service | None) -> None:
        ray = import_ray()
        super().__init__(
            "cuda:0" if ray.get_gpu_ids() else "cpu",
            address=ray.util.get_node_ip_address(),
            # Not the host name, which cloned machines may share.
            machine=str(ray.get_runtime_context().get_node_id()),
            threads=threads or max(1, core_count() // workers_on_machine),
        )
        self._thread, self._process = WorkThread("wanstream worker"), uuid.uuid4().hex
        self._service: Any = None
        if service is not None:
            path, settings = service
            make = pkgutil.resolve_name(f"{PACKAGE}.{path}")
            self._service = make(self.facts().device, workers_on_machine, **settings)

    def started(self) -> Started:
        """Return facts and log files of this worker."""
        return Started(
            facts=self.facts(),
            logs=_logs(),
            requires_token=os.environ.get("RAY_AUTH_MODE") == "token",
            process=self._process,
        )

    def serve(self, process: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the service. Raises RestartedError unless this is that process."""
        if process != self._process:
            raise RestartedError
        return getattr(self._service, method)(*args)

    def stream(self, task: RunTask, request: DenoiseRequest) -> Iterator[StepReport | TaskResult]:
        """Run a task of this request, and yield a report after every step, then the result. Raises as `run`."""
        # The run has its own thread, because this generator is suspended while Ray sends a report.
        reports: queue.SimpleQueue[StepReport | None] = queue.SimpleQueue()
        result = self._thread.submit(self.run, replace(task, request=request), reports.put)
        result.add_done_callback(lambda _: reports.put(None))
        while (report := reports.get()) is not None:
            yield report
        yield result.result()


def _logs() -> tuple[str, ...]:
    """Return the files of stdout and stderr, as set up by Ray; empty except on Linux."""
    try:
        return tuple(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    except OSError:
        return ()


PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).resolve().parent.parent.parent

CONCURRENT_CALLS = 4
"""Threads of the actor for calls other than `run`, so that a stop is not blocked by a slow call."""


def _pack_importer() -> Callable[[str, list[str]], None]:
    """Return the function that imports this pack from one of several folders; pickled by value like `actor_class`."""

    def import_pack(package: str, folders: list[str]) -> None:
        import importlib.util
        import sys
        from pathlib import Path

        if package in sys.modules:
            return
        installed = importlib.util.find_spec("wanstream")
        if installed is not None and installed.origin is not None:
            folders = [*folders, str(Path(installed.origin).parent)]
        found = [folder for folder in folders if Path(folder, "__init__.py").is_file()]
        if not found:
            searched = " or ".join(folders)
            raise ModuleNotFoundError(
                f"WanStream is not at {searched}: install it, or add its folder to the path_map of the cluster"
            )
        # Ray adds the working directory. If that is the pack's folder, our packages would shadow top-level modules
        # with the same names.
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(found[0]).resolve()]
        spec = importlib.util.spec_from_file_location(
            package, Path(found[0], "__init__.py"), submodule_search_locations=[found[0]]
        )
        assert spec is not None, package
        assert spec.loader is not None, package
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)

    return import_pack


def actor_class(ray: Any) -> Any:
    """Return the actor class, wrapped by `ray.remote`.

    It is defined inside this function, so that it is pickled by value, and refers to nothing of this package, which is
    not importable in the worker's process until `import_pack` has run.
    """
    import_pack = _pack_importer()

    class WanStreamWorker:
        def __init__(self, package: str, folders: list[str], settings: dict[str, Any]) -> None:
            import threading

            # Not started here: Ray wraps errors of a constructor in text. After a restart the first call starts it.
            self._package, self._folders, self._settings = package, folders, settings
            self._lock, self._worker = threading.Lock(), None

        def _ready(self) -> Any:
            import importlib

            with self._lock:
                if self._worker is None:
                    import_pack(self._package, self._folders)
                    module = importlib.import_module(f"{self._package}.distributed.ray.worker")
                    self._worker = module.RayWorker(**self._settings)
                return self._worker

        @ray.method(concurrency_group="calls")  # type: ignore[untyped-decorator]
        def call(self, method: str, args: tuple[Any, ...]) -> Any:
            return getattr(self._ready(), method)(*args)

        @ray.method(concurrency_group="runs", num_returns="streaming")  # type: ignore[untyped-decorator]
        def run(self, task: Any, request: Any) -> Iterator[Any]:
            yield from self._ready().stream(task, request)

    return ray.remote(concurrency_groups={"calls": CONCURRENT_CALLS, "runs": 1})(WanStreamWorker)
