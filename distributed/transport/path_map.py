"""Where files lie on the machine of a worker, and what is said of those that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

from ...schema import ExpertsRef, LoraRef, PathMap
from ..messages import WorkerFacts


class MissingPathError(OSError):
    """A path of the experts, or of the VAE, is missing on the machine of a worker; says which, and where."""


class DifferentFilesError(OSError):
    """Under one path the machines of workers have different weights; says which have how many bytes."""


def places(path: Path, maps: Sequence[PathMap]) -> tuple[Path, ...]:
    """Where `path` may lie on the machine of a worker: as each map says whose folder holds it, then where it is here.

    Machines differ, and the driver's own may be one of them.
    """
    found = [there for each in maps if (there := _mapped(path, each)) is not None]
    return tuple(dict.fromkeys((*found, path)))


def located(path: Path, maps: Sequence[PathMap]) -> Path:
    """Where `path` lies on this machine: the first of its places that is there, or the first one where none is."""
    every = places(path, maps)
    return next((place for place in every if place.exists()), every[0])


def located_experts(experts: ExpertsRef, maps: Sequence[PathMap]) -> ExpertsRef:
    """The same experts and LoRAs under their paths on this machine."""

    def here(path: Path | None) -> Path | None:
        return None if path is None else located(path, maps)

    loras = tuple(
        replace(lora, high_noise=here(lora.high_noise), low_noise=here(lora.low_noise)) for lora in experts.loras
    )
    return replace(
        experts, high_noise=located(experts.high_noise, maps), low_noise=here(experts.low_noise), loras=loras
    )


def weight_bytes(path: Path) -> int:
    """Bytes of the weights in that file, or directly in that folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".gguf"))


def paths_of(experts: ExpertsRef) -> tuple[Path, ...]:
    """Every path that the experts and their LoRAs need, each once."""
    loras = (path for lora in experts.loras for path in _paths_of_lora(lora))
    every = (experts.high_noise, experts.low_noise, *loras)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def check_paths(workers: Sequence[WorkerFacts], maps: Sequence[PathMap]) -> None:
    """Raise MissingPathError for workers, given by rank, that were asked about paths and do not have them all.

    Raises DifferentFilesError where they do not have the same weights there, as far as sizes tell.
    """
    gone: dict[str, list[str]] = {}
    for worker in workers:
        for path in worker.missing:
            machines = gone.setdefault(path, [])
            if worker.node not in machines:
                machines.append(worker.node)
    if not gone:
        _check_sizes(workers)
        return
    told = "; ".join(
        f"{' or '.join(map(str, places(Path(path), maps)))} is not there on {' and '.join(machines)}"
        for path, machines in gone.items()
    )
    known = ", ".join(f"{each.here} -> {each.there}" for each in maps) or "empty"
    raise MissingPathError(
        f"{told}: put the file there, or write where it is into the path_map of the cluster in the "
        f"list of clusters (the map is {known})"
    )


def _check_sizes(workers: Sequence[WorkerFacts]) -> None:
    found: dict[str, dict[int, str]] = {}
    for worker in workers:
        for path, nbytes in worker.sizes:
            found.setdefault(path, {}).setdefault(nbytes, worker.node)
    for path, machines in found.items():
        if len(machines) > 1:
            told = " and ".join(f"{nbytes} bytes on {node}" for nbytes, node in machines.items())
            raise DifferentFilesError(
                f"the weights of {path} have {told}: workers would compute with different ones. Put the same files on "
                "all machines"
            )


def _paths_of_lora(lora: LoraRef) -> tuple[Path | None, Path | None]:
    return lora.high_noise, lora.low_noise


def _mapped(path: Path, each: PathMap) -> Path | None:
    """Where that map says it lies; None where its folder does not hold it."""
    here = type(path)(each.here)
    if path != here and here not in path.parents:
        return None
    # A worker's machine may write paths in another way, which `there` shows.
    return Path(str(_pure(each.there).joinpath(*path.relative_to(here).parts)))


def _pure(path: str) -> PurePath:
    windows = PureWindowsPath(path)
    return windows if windows.drive else PurePosixPath(path)
