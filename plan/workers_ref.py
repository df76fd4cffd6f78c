"""Which workers are meant, named by value, so that they travel along a graph edge and are found again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .mesh import Mesh

IN_PROCESS = "in-process"
LOCAL = "local"

WeightHome = Literal["auto", "full", "sharded", "sharded in VRAM"]
"""Where the workers of a cell have their weights: all of them each, or 1/N each, which they gather block by block."""
WHOLE_WEIGHTS: WeightHome = "full"
SHARDED: WeightHome = "sharded"
ON_DEVICE: WeightHome = "sharded in VRAM"
WEIGHT_HOMES: tuple[WeightHome, ...] = ("auto", "full", "sharded", "sharded in VRAM")


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
    weights: WeightHome = "auto"
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
    """How long a worker waits for the others of its cell before it says that one hangs."""
