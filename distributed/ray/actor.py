"""Ray actor around a worker, as the driver defines it.

The class is pickled by value and imports this pack in the worker's process. The pack keeps the name
from the driver's process: ComfyUI names a pack after the folder, and classes must be pickled in
both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..messages import WorkerFacts

PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, kw_only=True)
class Started:
    """Report from a worker's process when it is ready."""

    facts: WorkerFacts
    logs: tuple[str, ...]
    """Log files on the worker's machine, with stdout and stderr."""
    requires_token: bool
    """True if Ray requires a token there."""
    process: str
    """Process identifier. Ray restarts an actor in another process, and raises no error if no
    call was running."""


class RestartedError(RuntimeError):
    """The call was meant for an earlier process of this actor."""


Service: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Object in each worker process: class, as `module:name` below this pack, and settings.

The class is called with the device, the number of processes on the machine, and the settings as
keyword arguments. The settings have built-in types, because they are unpickled before the pack is
imported there. Ray restarts a lost process with a new object.
"""

CONCURRENT_CALLS = 4
"""Actor threads for calls other than `run`, so that a slow call does not block a stop."""


def _pack_importer() -> Callable[[str, list[str]], None]:
    """Return the function that imports this pack from one of several folders.

    Pickled by value like `actor_class`.
    """

    def import_pack(package: str, folders: list[str]) -> None:
        import importlib.util
        import sys
        from pathlib import Path

        if package in sys.modules:
            return
        # The installed pack comes last: it may have another version than the driver's.
        installed = importlib.util.find_spec("wanstream")
        if installed is not None and installed.origin is not None:
            folders = [*folders, str(Path(installed.origin).parent)]
        found = [folder for folder in folders if Path(folder, "__init__.py").is_file()]
        if not found:
            searched = " or ".join(folders)
            raise ModuleNotFoundError(
                f"WanStream is not at {searched}: install it, or add its folder to the path_map of "
                "the cluster"
            )
        # Ray adds the working directory. If it is the pack's folder, our packages would shadow
        # top-level modules with the same names.
        sys.path[:] = [
            path for path in sys.path if Path(path).resolve() != Path(found[0]).resolve()
        ]
        spec = importlib.util.spec_from_file_location(
            package, Path(found[0], "__init__.py"), submodule_search_locations=[found[0]]
        )
        assert spec is not None, package
        assert spec.loader is not None, package
        module = importlib.util.module_from_spec(spec)
        # Before `exec_module`, as in importlib: the pack's modules import it while it loads.
        sys.modules[package] = module
        spec.loader.exec_module(module)

    return import_pack


def actor_class(ray: Any) -> Any:
    """Return the actor class, wrapped by `ray.remote`.

    The definition is inside this function, so it is pickled by value. It refers to nothing in this
    package, because the worker's process cannot import the package before `import_pack` has run.
    """
    import_pack = _pack_importer()

    class WanStreamWorker:
        def __init__(self, package: str, folders: list[str], settings: dict[str, Any]) -> None:
            import threading

            # Not started here: Ray turns constructor errors into text. After a restart the first
            # call starts it.
            self._package = package
            self._folders = folders
            self._settings = settings
            self._lock = threading.Lock()
            self._worker = None

        def _ready(self) -> Any:
            # Calls run on several threads, and the worker must be created once.
            with self._lock:
                if self._worker is None:
                    self._worker = self._start()
                return self._worker

        def _start(self) -> Any:
            import gc
            import importlib

            # The imports create half a million objects, which are never garbage. Collections during
            # them take a sixth of the start, and each later one, as in `Worker.join`, 0.3 s.
            gc.disable()
            try:
                import_pack(self._package, self._folders)
                module = importlib.import_module(f"{self._package}.distributed.ray.worker")
                worker = module.RayWorker(**self._settings)
                gc.freeze()
            finally:
                gc.enable()
            return worker

        @ray.method(concurrency_group="calls")  # type: ignore[untyped-decorator]
        def call(self, method: str, args: tuple[Any, ...]) -> Any:
            return getattr(self._ready(), method)(*args)

        @ray.method(concurrency_group="runs", num_returns="streaming")  # type: ignore[untyped-decorator]
        def run(self, task: Any, request: Any) -> Iterator[Any]:
            import dataclasses

            # Computed on this thread, while Ray takes the reports.
            yield from self._ready().stream(dataclasses.replace(task, request=request))

    # One thread for runs, so that tasks never overlap.
    return ray.remote(concurrency_groups={"calls": CONCURRENT_CALLS, "runs": 1})(WanStreamWorker)
