"""The actor around a worker. Its class travels to the worker's process by value and imports this pack there.

There the pack gets the name that it has here, so that values of its classes can travel in both directions; ComfyUI
names it after its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = __name__.rsplit(".", 3)[0]
FOLDER = Path(__file__).resolve().parent.parent.parent

ASKS_AT_ONCE = 4


def actor_class(ray: Any) -> Any:
    """The class of actors, which `ray.remote` has seen; of ours it names nothing, as nothing of ours is there yet."""

    class WanStreamWorker:
        def start(self, package: str, folders: list[str], threads: int | None, workers_here: int) -> Any:
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
                    looked = " or ".join(folders)
                    raise ModuleNotFoundError(
                        f"WanStream is not at {looked}: install it, or put its folder into the path_map of the cluster"
                    )
                # Ray puts the working directory there, in which our rooms would pass for other people's modules.
                sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(found[0]).resolve()]
                spec = importlib.util.spec_from_file_location(
                    package, Path(found[0], "__init__.py"), submodule_search_locations=[found[0]]
                )
                assert spec is not None, package
                assert spec.loader is not None, package
                module = importlib.util.module_from_spec(spec)
                sys.modules[package] = module
                spec.loader.exec_module(module)
            served = importlib.import_module(f"{package}.distributed.ray.worker")
            self._served = served.ServedWorker(threads=threads, workers_here=workers_here)
            return self._served.started()

        @ray.method(concurrency_group="asks")  # type: ignore[untyped-decorator]
        def ask(self, method: str, args: tuple[Any, ...]) -> Any:
            return self._served.ask(method, args)

        @ray.method(concurrency_group="runs", num_returns="streaming")  # type: ignore[untyped-decorator]
        def run(self, task: Any) -> Iterator[Any]:
            yield from self._served.run(task)

    return ray.remote(concurrency_groups={"asks": ASKS_AT_ONCE, "runs": 1})(WanStreamWorker)
