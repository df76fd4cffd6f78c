"""References to workers by value, and their parsing from text: layout, path maps, addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Literal

from .mesh import Mesh

IN_PROCESS = "in-process"
LOCAL = "local"

WeightPlacement = Literal["auto", "full", "sharded", "sharded in VRAM"]
"""Where the workers of a group have their weights: all of them each, or 1/N each, which they gather block by block."""
WHOLE_WEIGHTS: WeightPlacement = "full"
SHARDED: WeightPlacement = "sharded"
ON_DEVICE: WeightPlacement = "sharded in VRAM"
WEIGHT_PLACEMENTS: tuple[WeightPlacement, ...] = ("auto", "full", "sharded", "sharded in VRAM")


Goal = Literal["latency", "throughput"]
"""What a layout is to serve where the planner proposes it."""
GOALS: tuple[Goal, ...] = ("latency", "throughput")


@dataclass(frozen=True, kw_only=True)
class PathMap:
    """A folder here, and where the same files lie on the machine of a worker; both absolute."""

    here: str
    there: str


@dataclass(frozen=True, kw_only=True)
class WorkersRef:
    """Workers and their layout. Equal references find the same workers, with the experts that they hold open."""

    count: int
    """How many workers; 1 is what a run without workers is."""
    mesh: Mesh | None = None
    """How they are laid out; None: as the planner proposes for the run, with `goal` in mind."""
    goal: Goal = "latency"
    address: str = LOCAL
    """`IN_PROCESS` (one worker, in this process), `LOCAL` (a Ray of their own on this machine), or the address of a
    Ray cluster that runs already ("host:port"). Never taken from a graph: see `clusters`."""
    token_file: str = ""
    """The file with the token of the cluster, which is sent to `address` alone; empty: no token is sent."""
    weights: WeightPlacement = "auto"
    paths: tuple[PathMap, ...] = ()
    """For workers on other machines: each worker takes the first under which a file is there, else the path here."""
    threads: int | None = None
    """CPU threads of each worker; None: the cores of the machine shared out between its workers."""
    beyond_loopback: bool = False
    """Whether workers may listen on addresses that other machines reach; needed for a cluster, refused without its
    token."""
    max_restarts: int = 3
    """How many lost workers are replaced in one run."""
    timeout_s: float = 300.0
    """How long a worker waits for the others of its group before it says that one hangs."""


ARROW = "->"
HEADS = 40
"""Of Wan2.2 A14B; what is known before the experts are."""


class WorkersError(ValueError):
    """Workers that there cannot be, as they were described; the message says why, and what to write instead."""


def path_maps(text: str) -> tuple[PathMap, ...]:
    """One `here -> there` per line, both absolute; empty lines count for nothing. Raises WorkersError with the line."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return tuple(_path_map(number, line) for number, line in lines if line)


def _path_map(number: int, line: str) -> PathMap:
    parts = [part.strip() for part in line.split(ARROW)]
    if len(parts) != 2 or not all(parts):
        raise WorkersError(
            f"line {number} of the path map is {line!r}: write the folder here, {ARROW}, and the folder there, like "
            "/models -> /mnt/models"
        )
    for part in parts:
        if not (PurePosixPath(part).is_absolute() or PureWindowsPath(part).is_absolute()):
            raise WorkersError(f"line {number} of the path map: {part!r} is no absolute path; begin it at the root")
    here, there = parts
    return PathMap(here=here, there=there)


def path_map_text(paths: tuple[PathMap, ...]) -> str:
    """The inverse of `path_maps`."""
    return "\n".join(f"{path.here} {ARROW} {path.there}" for path in paths)


def check_count(count: int, address: str, *, gpus: int | None, most: int) -> None:
    """Raise WorkersError for more workers than there is room for.

    Args:
        count: workers that are asked for.
        address: as of `WorkersRef`.
        gpus: GPUs of this machine that this process sees; None: workers compute on its CPU.
        most: more than that are refused anywhere.
    """
    if not 1 <= count <= most:
        raise WorkersError(f"{count} workers: give 1 to {most}")
    if address == IN_PROCESS and count > 1:
        raise WorkersError(
            f"{count} workers in this process: there can be one, so set count to 1 or cluster to {LOCAL!r}"
        )
    if address == LOCAL and gpus is not None and count > gpus:
        seen = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise WorkersError(
            f"{count} workers, but {seen} here: every worker takes one. Lower count to {gpus}, or name a Ray cluster. "
            "If there are more, CUDA_VISIBLE_DEVICES or ComfyUI's --cuda-device hides them"
        )


def check_degrees(mesh: Mesh, count: int) -> None:
    """Raise WorkersError for a layout that takes another number of workers, or that cannot share out the heads."""
    if mesh.size != count:
        product = " x ".join(str(degree) for _, degree in mesh.degrees)
        raise WorkersError(
            f"data x stage x cfg x ring x ulysses is {product} = {mesh.size}, and there are {count} workers: change "
            "one of the degrees, or count"
        )
    if HEADS % mesh.ulysses:
        fitting = ", ".join(str(degree) for degree in range(1, HEADS + 1) if HEADS % degree == 0)
        raise WorkersError(
            f"ulysses {mesh.ulysses} does not divide the {HEADS} attention heads: give one of {fitting}, and the rest "
            "of the workers to ring, cfg or data"
        )


def describe_workers(ref: WorkersRef) -> str:
    """`2 workers, local: cfg 2`, for a reader."""
    count = f"{ref.count} worker{'s' * (ref.count != 1)}"
    return f"{count}, {ref.address}: {ref.goal if ref.mesh is None else ref.mesh}"
