"""Ray actor around a worker. Its class is pickled by value and imports this pack in the worker's process.

The pack is imported there under the name that it has here, so that its classes can be pickled in both directions;
ComfyUI names a pack after its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).resolve().parent.parent.parent

CONCURRENT_CALLS = 4
"""Threads of the actor for calls other than `run`, so that a stop is not blocked by a slow call."""


def actor_class(ray: Any) -> Any:
    """Return the actor class, wrapped by `ray.remote`.

    It is defined inside this function, so that it is pickled by value, and refers to nothing of this package, which is
    not importable in the worker's process until `start` has run.
    """

    class WanStreamWorker:
        def start(self, package: str, folders: list[str], threads: int | None, workers_on_machine: int) -> Any:
            import importlib
            import importlib.util
            import sys
            from pathlib import Path

            if package not in sys.modules:
                installed = importlib.util.find_spec("wanstream")
                if installed is not None and installed.origin is not None:
                    folders = [*folders, str(Path(installed.origin).parent)]
                found = [folder for folder in folders if Path(folder, "__init__.py").is_file()]
                if not found:
                    searched = " or ".join(folders)
                    raise ModuleNotFoundError(
                        f"WanStream is not at {searched}: install it, or add its folder to the path_map of the cluster"
                    )
                # Ray adds the working directory. If that is the pack's folder, our packages would shadow top-level
                # modules with the same names.
                sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(found[0]).resolve()]
                spec = importlib.util.spec_from_file_location(
                    package, Path(found[0], "__init__.py"), submodule_search_locations=[found[0]]
                )
                assert spec is not None, package
                assert spec.loader is not None, package
                module = importlib.util.module_from_spec(spec)
                sys.modules[package] = module
                spec.loader.exec_module(module)
            worker = importlib.import_module(f"{package}.distributed.ray.worker")
            self._worker = worker.RayWorker(threads=threads, workers_on_machine=workers_on_machine)
            return self._worker.started()

        @ray.method(concurrency_group="calls")  # type: ignore[untyped-decorator]
        def ask(self, method: str, args: tuple[Any, ...]) -> Any:
            return self._worker.ask(method, args)

        @ray.method(concurrency_group="runs", num_returns="streaming")  # type: ignore[untyped-decorator]
        def run(self, task: Any) -> Iterator[Any]:
            yield from self._worker.run(task)

    return ray.remote(concurrency_groups={"calls": CONCURRENT_CALLS, "runs": 1})(WanStreamWorker)
