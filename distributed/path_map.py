"""Paths on the machines of workers, and errors for missing or different files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..schema.refs import ExpertsRef, PathMap
from .messages import WorkerFacts


class MissingPathError(OSError):
    """A path to the experts or the VAE is missing on a worker's machine.

    The message has both.
    """


class DifferentFilesError(OSError):
    """Machines have different weights under one path. The message has their sizes in bytes."""


def places(path: Path, maps: Sequence[PathMap]) -> tuple[Path, ...]:
    """Return the candidates for `path` on a worker's machine.

    They are the mapped paths in the order of `maps`, then `path` itself. The unmapped path is
    included because the worker may run on the driver's machine.
    """
    found = [there for each in maps if (there := _mapped(path, each)) is not None]
    return tuple(dict.fromkeys((*found, path)))


def resolve_path(path: Path, maps: Sequence[PathMap]) -> Path:
    """Return the first existing candidate for `path` on this machine, else the first one."""
    every = places(path, maps)
    return next((place for place in every if place.exists()), every[0])


def resolve_experts(experts: ExpertsRef, maps: Sequence[PathMap]) -> ExpertsRef:
    """Return the same experts and LoRAs with paths on this machine."""

    def here(path: Path | None) -> Path | None:
        return None if path is None else resolve_path(path, maps)

    loras = tuple(
        replace(lora, high_noise=here(lora.high_noise), low_noise=here(lora.low_noise))
        for lora in experts.loras
    )
    return replace(
        experts,
        high_noise=resolve_path(experts.high_noise, maps),
        low_noise=here(experts.low_noise),
        loras=loras,
    )


def weight_bytes(path: Path) -> int:
    """Return the size of the weights in a file, or directly in a folder, in bytes."""
    if path.is_file():
        return path.stat().st_size
    return sum(
        file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".gguf")
    )


def paths_of(experts: ExpertsRef) -> tuple[Path, ...]:
    """Return all paths of the experts and their LoRAs, without duplicates."""
    every = (experts.high_noise, experts.low_noise, *(path for path, _ in experts.lora_files))
    return tuple(dict.fromkeys(path for path in every if path is not None))


def check_paths(workers: Sequence[WorkerFacts], maps: Sequence[PathMap]) -> None:
    """Compare the files of workers. Their facts must include the requested paths.

    Raises:
        MissingPathError: a machine lacks a path.
        DifferentFilesError: weights under one path differ in size. Their content is not compared.
    """
    found: dict[str, dict[int | None, list[str]]] = {}
    for worker in workers:
        for path, nbytes in worker.sizes.items():
            machines = found.setdefault(path, {}).setdefault(nbytes, [])
            if worker.node not in machines:
                machines.append(worker.node)
    missing = "; ".join(
        f"{' or '.join(map(str, places(Path(path), maps)))} does not exist on "
        f"{' and '.join(sizes[None])}"
        for path, sizes in found.items()
        if None in sizes
    )
    if missing:
        known = ", ".join(f"{each.here} -> {each.there}" for each in maps) or "empty"
        raise MissingPathError(
            f"{missing}: copy the file there, or add its folder there to the path_map of the "
            f"cluster in the list of clusters (the map is {known})"
        )
    for path, sizes in found.items():
        if len(sizes) > 1:
            told = " and ".join(
                f"{nbytes} bytes on {machines[0]}" for nbytes, machines in sizes.items()
            )
            raise DifferentFilesError(
                f"the weights of {path} have {told}: workers would compute with different ones. "
                "Copy the same files to all machines"
            )


def _mapped(path: Path, each: PathMap) -> Path | None:
    """Return the path under a map's target.

    None if the path is outside the map's folder.
    """
    if not path.is_relative_to(each.here):
        return None
    # The worker's machine may use another path syntax than this one. `there` decides.
    windows = PureWindowsPath(each.there)
    there = windows if windows.drive else PurePosixPath(each.there)
    return Path(str(there.joinpath(*path.relative_to(each.here).parts)))
