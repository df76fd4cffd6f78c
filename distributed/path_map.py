"""Paths of experts as they are on the machine of a worker, and what is said of those that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

from ..plan import ExpertsRef, LoraRef, PathMap
from .tasks import WorkerFacts


class MissingPathError(OSError):
    """A path of the experts is missing on the machine of a worker; the message says which, and where."""


def mapped(path: Path, maps: Sequence[PathMap]) -> Path:
    """Where `path` lies on the machine of a worker: as the first map says whose folder holds it, else where it is."""
    for each in maps:
        here = type(path)(each.here)
        if path == here or here in path.parents:
            # A worker's machine may write paths in another way, which `there` shows.
            there = _pure(each.there).joinpath(*path.relative_to(here).parts)
            return Path(str(there))
    return path


def mapped_experts(experts: ExpertsRef, maps: Sequence[PathMap]) -> ExpertsRef:
    """The same experts and LoRAs under their paths on the machine of a worker."""

    def there(path: Path | None) -> Path | None:
        return None if path is None else mapped(path, maps)

    loras = tuple(
        replace(lora, high_noise=there(lora.high_noise), low_noise=there(lora.low_noise)) for lora in experts.loras
    )
    return replace(
        experts, high_noise=mapped(experts.high_noise, maps), low_noise=there(experts.low_noise), loras=loras
    )


def paths_of(experts: ExpertsRef) -> tuple[Path, ...]:
    """Every path that the experts and their LoRAs need, each once."""
    loras = (path for lora in experts.loras for path in _paths_of_lora(lora))
    every = (experts.high_noise, experts.low_noise, *loras)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def check_paths(workers: Sequence[WorkerFacts], maps: Sequence[PathMap]) -> None:
    """Raise MissingPathError for workers, given by rank, that were asked about paths and do not have them all."""
    gone: dict[str, list[str]] = {}
    for worker in workers:
        for path in worker.missing:
            machines = gone.setdefault(path, [])
            if worker.node not in machines:
                machines.append(worker.node)
    if not gone:
        return
    told = "; ".join(f"{path} is not there on {' and '.join(machines)}" for path, machines in gone.items())
    known = ", ".join(f"{each.here} -> {each.there}" for each in maps) or "empty"
    raise MissingPathError(
        f"{told}: put the file there, or say in the path map of the workers where it is (the map is {known})"
    )


def _paths_of_lora(lora: LoraRef) -> tuple[Path | None, Path | None]:
    return lora.high_noise, lora.low_noise


def _pure(path: str) -> PurePath:
    windows = PureWindowsPath(path)
    return windows if windows.drive else PurePosixPath(path)
