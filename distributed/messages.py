"""Messages between the driver and its workers: plain values that every transport can send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..sampling import DenoiseRequest, RunState
from ..schema import (
    Cancelled,
    CodeFormat,
    ExpertsRef,
    Mesh,
    OffloadPolicy,
    PathMap,
    StepRecord,
    Timeline,
    WeightPlacement,
)
from ..wan import BY_FILE_NAME


@dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """Rendezvous of the workers of one group. All of them get the same values except for the rank.

    Each group has its own rendezvous, so that a group that lost a worker can join again while the others compute.
    """

    rank: int
    """Rank in the group, from 0 for the leader; not the rank in the pool."""
    mesh: Mesh
    """Mesh of these workers alone: its data and stage degrees are 1."""
    host: str
    """Address of the leader, which serves the store; all workers of the group must reach it."""
    port: int
    generation: int
    """Number of the rendezvous, from 1; messages of earlier ones are ignored."""
    timeout_s: float
    spans_machines: bool = False
    """True if the workers of the group lie on several machines."""
    weights: WeightPlacement = "full"
    """With "auto", the workers of each group measure before their first run, and choose together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTask:
    """Part of a run, for all workers of one group."""

    run_id: str = ""
    """Unique for every try of a job."""
    experts: ExpertsRef
    """Experts with paths of the driver's machine."""
    request: DenoiseRequest
    policy: OffloadPolicy
    paths: tuple[PathMap, ...] = ()
    """Maps from these paths to paths of the worker's machine."""
    resume: RunState | None = None
    until: int | None = None
    """See `RunSlice`."""
    handover_s: float | None = None
    """Interval in seconds at which the leader reports its state; None: after the last step only, as always."""
    preview_s: float | None = None
    """Shortest interval in seconds at which the leader reports its estimate of the latents; None: never."""
    generation: int = 0
    """Rendezvous that the worker must be in; 0: any, or none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """Report of a worker after a step."""

    record: StepRecord
    denoised: torch.Tensor | None = None
    """[B, 16, T, h, w] float32 on the CPU, in reports of the leader in which it is due; see `RunTask.preview_s`."""
    state: RunState | None = None
    """State after the step, in reports of the leader in which it is due; see `RunTask.handover_s`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """Result of a worker after its task. The transport raises errors instead."""

    timeline: Timeline
    gathered_bytes: int = 0
    """Bytes received from other workers in this task: velocities, tokens and shards of weights."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Properties of a worker that the driver reads before it sends a task."""

    pid: int
    node: str
    """Host name of the machine, for messages; machines that were cloned may share one."""
    address: str
    """Address for other workers."""
    device: str
    """Device of the worker's process: "cuda:0" or "cpu"."""
    wanstream: str
    torch: str
    diffusers: str
    python: str
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes of the weights of requested paths (see `weight_bytes`); None for paths that are missing on its machine."""
    tile_bytes: int = 0
    """Device memory for a decode: the free memory and the memory that experts release. All workers of a machine share
    its RAM."""
    generation: int = 0
    """Rendezvous of the worker; 0 outside of one."""
    auto_dtype: str = "float32"
    """Dtype on this worker for experts with `compute_dtype` "auto"."""
    multiplied: tuple[CodeFormat, ...] = ()
    """Formats of codes that this worker can multiply as they are stored."""
    machine: str = ""
    """Identifier of the machine. Workers with the same one share its RAM and page cache."""
    link_bytes_per_s: int = 0
    """Speed of the network card of `address`, as reported by the system; 0 if it reports none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeTask:
    """Videos, or one tile of a video, to be decoded."""

    run_id: str = ""
    """Unique for every try of a decode."""
    vae: Path
    """VAE file or folder, as a path on the driver's machine."""
    latents: torch.Tensor
    """[B, C, T, h, w], raw latents on the CPU; B is 1 for a tile."""
    dtype: torch.dtype = torch.float32
    """Compute dtype of the VAE."""
    latent_scale: str = BY_FILE_NAME
    """One of `LATENT_SCALES`, for a tiny VAE."""
    paths: tuple[PathMap, ...] = ()
    """Mapping of the path to the worker's machine."""


class DecodeCancelled(Cancelled):
    """The decode was stopped before a latent frame; the worker can decode again immediately."""
