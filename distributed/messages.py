"""What the driver asks of a worker and what comes back: plain values, which every transport can carry."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..sampling import DenoiseRequest, RunState
from ..schema import ExpertsRef, Mesh, OffloadPolicy, PathMap, StepRecord, Timeline, WeightPlacement


@dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """Where the workers of one group meet, and as whom. Every one of them gets the same but for its rank.

    Groups meet apart, so that one that lost a worker can meet anew while the others compute.
    """

    rank: int
    """From 0 in the group; the first one leads it. Not the rank in the pool."""
    mesh: Mesh
    """Of those who meet: its data and stage are 1, its size is how many they are."""
    host: str
    """Of the rank that keeps the store; an address that all of them reach."""
    port: int
    generation: int
    """Counts the rendezvous of these workers; nothing of a former one is heard in this."""
    timeout_s: float
    weights: WeightPlacement = "full"
    """Left to the workers of each group by "auto": they measure before their first run, and decide together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTask:
    """A part of a run, for all workers of one group."""

    run_id: str
    experts: ExpertsRef
    """Paths as they are on the driver's machine."""
    request: DenoiseRequest
    policy: OffloadPolicy
    paths: tuple[PathMap, ...] = ()
    """Where these lie on the worker's machine."""
    resume: RunState | None = None
    until: int | None = None
    """As of `RunSlice`."""
    generation: int | None = None
    """Of the rendezvous in which it is to be computed; None: in whichever there is, or alone."""
    wants_state: bool = True
    """Whether the leader tells the state after every step; without it nobody can go on after a loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """A worker has finished a step."""

    run_id: str
    rank: int
    record: StepRecord
    done: int
    total: int
    """As of `StepProgress`."""
    denoised: torch.Tensor | None = None
    """[B, 16, T, h, w] float32 on the CPU; of the leader only."""
    state: RunState | None = None
    """Of the leader only, where it was asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """A worker has finished its task; what it raised instead goes the way of the transport."""

    run_id: str
    rank: int
    timeline: Timeline
    latents: torch.Tensor | None
    """[B, 16, T, h, w] float32 on the CPU after the last step of the task; of the leader only."""
    sigma: float
    gathered_bytes: int = 0
    """Bytes that came from other workers in this task: velocities, tokens and shards of weights."""
    expert_switches: int = 0
    """How often the expert changed between two steps of this worker since it was started."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """What the driver wants to know of a worker before it is given anything."""

    pid: int
    node: str
    """Host name of the machine, for messages; machines that were cloned may share one."""
    address: str
    """Where other workers reach it."""
    device: str
    """"cuda:0" or "cpu", as the worker sees it."""
    device_name: str
    free_bytes: int | None
    """Of the device; None on a CPU."""
    wanstream: str
    torch: str
    diffusers: str
    python: str
    missing: tuple[str, ...] = field(default=())
    """Of the paths that were asked about, those that are in none of their places there."""
    sizes: tuple[tuple[str, int], ...] = ()
    """(path, bytes of its weights) of those that are there; see `weight_bytes`."""
    tile_bytes: int = 0
    """Of the device, that a decode may take: what is free, and what experts let go of. All workers of a machine share
    its RAM."""
    generation: int | None = None
    """Of the rendezvous that it is in; None outside one."""
    auto_dtype: str = "float32"
    """The dtype that experts compute in there where their `compute_dtype` is "auto"."""
    machine: str = ""
    """Identifier of the machine; workers with the same one share its RAM and page cache."""
