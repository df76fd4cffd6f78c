"""Paths on the machines of workers, and errors for missing or different files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

from ...schema import ExpertsRef, PathMap
from ..messages import WorkerFacts


class MissingPathError(OSError):
    """A path of the experts or of the VAE is missing on a worker's machine. The message has both."""


class DifferentFilesError(OSError):
    """Machines have different weights under one path. The message has their sizes in bytes."""


def places(path: Path, maps: Sequence[PathMap]) -> tuple[Path, ...]:
    """Return candidates for `path` on a worker's machine: its mapped paths in the order of `maps`, then `path` itself.

    The unmapped path is included because one of the machines may be the driver's.
    """
    found = [there for each in maps if (there := _mapped(path, each)) is not None]
    return tuple(dict.fromkeys((*found, path)))


def resolve_path(path: Path, maps: Sequence[PathMap]) -> Path:
    """Return the first candidate for `path` that exists on this machine, or the first one if none exists."""
    every = places(path, maps)
    return next((place for place in every if place.exists()), every[0])


def resolve_experts(experts: ExpertsRef, maps: Sequence[PathMap]) -> ExpertsRef:
    """Return the same experts and LoRAs with paths of this machine."""

    def here(path: Path | None) -> Path | None:
        return None if path is None else resolve_path(path, maps)

    loras = tuple(
        replace(lora, high_noise=here(lora.high_noise), low_noise=here(lora.low_noise)) for lora in experts.loras
    )
    return replace(
        experts, high_noise=resolve_path(experts.high_noise, maps), low_noise=here(experts.low_noise), loras=loras
    )


def weight_bytes(path: Path) -> int:
    """Return the bytes of the weights in a file, or directly in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".gguf"))


def paths_of(experts: ExpertsRef) -> tuple[Path, ...]:
    """Return all paths of the experts and their LoRAs, without duplicates."""
    loras = (path for lora in experts.loras for path in (lora.high_noise, lora.low_noise))
    every = (experts.high_noise, experts.low_noise, *loras)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def check_paths(workers: Sequence[WorkerFacts], maps: Sequence[PathMap]) -> None:
    """Compare the files of workers, whose facts include requested paths.

    Raises:
        MissingPathError: a machine lacks a path.
        DifferentFilesError: weights under one path have different sizes. Their content is not compared.
    """
    found: dict[str, dict[int | None, list[str]]] = {}
    for worker in workers:
        for path, nbytes in worker.sizes.items():
            machines = found.setdefault(path, {}).setdefault(nbytes, [])
            if worker.node not in machines:
                machines.append(worker.node)
    missing = "; ".join(
        f"{' or '.join(map(str, places(Path(path), maps)))} does not exist on {' and '.join(sizes[None])}"
        for path, sizes in found.items()
        if None in sizes
    )
    if missing:
        known = ", ".join(f"{each.here} -> {each.there}" for each in maps) or "empty"
        raise MissingPathError(
            f"{missing}: copy the file there, or add its folder there to the path_map of the cluster in the list of "
            f"clusters (the map is {known})"
        )
    for path, sizes in found.items():
        if len(sizes) > 1:
            told = " and ".join(f"{nbytes} bytes on {machines[0]}" for nbytes, machines in sizes.items())
            raise DifferentFilesError(
                f"the weights of {path} have {told}: workers would compute with different ones. Copy the same files "
                "to all machines"
            )


def _mapped(path: Path, each: PathMap) -> Path | None:
    """Return the path under the target of a map; None if the folder of the map does not contain it."""
    if not path.is_relative_to(each.here):
        return None
    # The worker's machine may have another path syntax than this one; that of `there` is used.
    windows = PureWindowsPath(each.there)
    there = windows if windows.drive else PurePosixPath(each.there)
    return Path(str(there.joinpath(*path.relative_to(each.here).parts)))
