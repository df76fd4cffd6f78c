"""References to workers: number, places and layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Literal

from ..mesh import Mesh
from ..text.numbers import format_count

IN_PROCESS = "in-process"


LOCAL = "local"


WeightPlacement = Literal["auto", "full", "sharded", "sharded in VRAM"]
"""Weight placement in a worker group: a full copy per worker, or one shard each, gathered block by
block."""


WHOLE_WEIGHTS: WeightPlacement = "full"


SHARDED: WeightPlacement = "sharded"


ON_DEVICE: WeightPlacement = "sharded in VRAM"


WEIGHT_PLACEMENTS: tuple[WeightPlacement, ...] = ("auto", "full", "sharded", "sharded in VRAM")


Goal = Literal["latency", "throughput"]
"""Goal for a layout chosen by the planner."""


GOALS: tuple[Goal, ...] = ("latency", "throughput")


@dataclass(frozen=True, kw_only=True)
class PathMap:
    """Folder on this machine, and the folder with the same files on a worker's machine.

    Both are absolute.
    """

    here: str
    there: str


@dataclass(frozen=True, kw_only=True)
class WorkersRef:
    """Workers and their layout.

    Equal references share the same workers and the experts open there.
    """

    count: int
    """Worker count. 1 computes like a run without workers."""
    mesh: Mesh | None = None
    """Worker layout. None: the planner chooses one for the run and `goal`."""
    goal: Goal = "latency"
    address: str = LOCAL
    """`IN_PROCESS` (one worker, in this process), `LOCAL` (a private Ray on this machine), or the
    address of a running Ray cluster ("host:port"). Never taken from a graph: see `clusters`."""
    token_file: str = ""
    """File with the cluster token, sent to `address` only. Empty: no token is sent."""
    weights: WeightPlacement = "auto"
    paths: tuple[PathMap, ...] = ()
    """Path maps for workers on other machines. Each worker uses the first map with an existing
    target, else the local path."""
    threads: int | None = None
    """CPU threads per worker. None: the machine's cores divided by the workers on it."""
    beyond_loopback: bool = False
    """True if workers may listen on addresses that other machines can reach. Needed for a remote
    cluster, and refused without the token."""
    max_restarts: int = 3
    """Most restarts per worker group within an hour. The next loss ends the run. 0: the first loss
    ends it."""
    timeout_s: float = 300.0
    """Seconds a worker waits for the others in its group before it reports a hang."""


ARROW = "->"


HEADS = 40
"""Attention heads in Wan2.2 A14B, for checks before the experts are open."""


class WorkersError(ValueError):
    """Invalid description of workers. The message says why, and what to write instead."""


def path_maps(text: str) -> tuple[PathMap, ...]:
    """Parse one `here -> there` per line, both absolute. Empty lines are skipped.

    Raises WorkersError with the line number.
    """
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return tuple(_path_map(number, line) for number, line in lines if line)


def _path_map(number: int, line: str) -> PathMap:
    parts = [part.strip() for part in line.split(ARROW)]
    if len(parts) != 2 or not all(parts):
        raise WorkersError(
            f"line {number} of the path map is {line!r}: write the folder here, {ARROW}, and the "
            "folder there, like /models -> /mnt/models"
        )
    for part in parts:
        # Either kind: workers may run on another system than this machine.
        if not (PurePosixPath(part).is_absolute() or PureWindowsPath(part).is_absolute()):
            raise WorkersError(
                f"line {number} of the path map: {part!r} is not an absolute path; start it at the "
                "root"
            )
    here, there = parts
    return PathMap(here=here, there=there)


def check_count(count: int, address: str, *, gpus: int | None, most: int) -> None:
    """Raise WorkersError for fewer workers than one, or more than the machine can run.

    Args:
        count: requested number of workers.
        address: address as in `WorkersRef`.
        gpus: visible GPUs on this machine. None: the workers compute on its CPU.
        most: largest number allowed at any address.
    """
    if not 1 <= count <= most:
        raise WorkersError(f"{count} workers: give 1 to {most}")
    if address == IN_PROCESS and count > 1:
        raise WorkersError(
            f"{count} workers in this process: there can be one, so set count to 1 or cluster to "
            f"{LOCAL!r}"
        )
    # A cluster may have GPUs in other machines. There Ray counts the GPUs.
    if address == LOCAL and gpus is not None and count > gpus:
        raise WorkersError(
            f"{count} workers, but {format_count(gpus, 'GPU')} here: every worker takes one. Lower "
            f"count to {gpus}, or name a Ray cluster. If there are more, CUDA_VISIBLE_DEVICES or "
            "ComfyUI's --cuda-device hides them"
        )


def check_degrees(mesh: Mesh, count: int) -> None:
    """Raise WorkersError for a wrong worker count, or a layout that does not divide the heads."""
    if mesh.size != count:
        product = " x ".join(str(degree) for _, degree in mesh.degrees)
        raise WorkersError(
            f"data x stage x cfg x ring x ulysses is {product} = {mesh.size}, and there are "
            f"{count} workers: change one of the degrees, or count"
        )
    if HEADS % mesh.ulysses:
        fitting = ", ".join(str(degree) for degree in range(1, HEADS + 1) if HEADS % degree == 0)
        raise WorkersError(
            f"ulysses {mesh.ulysses} does not divide the {HEADS} attention heads: give one of "
            f"{fitting}, and the rest of the workers to ring, cfg or data"
        )


def describe_workers(ref: WorkersRef) -> str:
    """Format the reference as text: `2 workers, local: cfg 2`."""
    return f"{format_count(ref.count, 'worker')}, {ref.address}: {ref.mesh or ref.goal}"
