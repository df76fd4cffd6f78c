"""Messages between driver and workers: plain values for every transport."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from ..sampling.inputs import DenoiseRequest
from ..sampling.steps import RunState
from ..schema import VERSION, Cancelled, Mesh, OffloadPolicy
from ..schema.records import StepRecord, Timeline
from ..schema.refs import CodeFormat, ExpertsRef, PathMap, WeightPlacement
from ..wan.vae import BY_FILE_NAME


@dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """Rendezvous for one worker group. Except for the rank, all workers get the same values.

    Each group has a separate rendezvous. A group that lost a worker can join again while the others
    compute.
    """

    rank: int
    """Rank in the group, from 0 for the leader; not the rank in the pool."""
    mesh: Mesh
    """Mesh of these workers alone, with data and stage degrees of 1."""
    host: str
    """The leader's address. It serves the store, and all workers in the group must reach it."""
    port: int
    generation: int
    """Number of the rendezvous, from 1. Messages from earlier ones are ignored."""
    timeout_s: float
    spans_machines: bool = False
    """True if the group has workers on several machines."""
    weights: WeightPlacement = "full"
    """With "auto", the workers in each group measure before their first run, and choose
    together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTask:
    """Part of a run, for all workers in one group."""

    run_id: str = ""
    """Unique for every try."""
    experts: ExpertsRef
    """Experts with paths on the driver's machine."""
    request: DenoiseRequest
    policy: OffloadPolicy
    paths: tuple[PathMap, ...] = ()
    """Maps from these paths to paths on the worker's machine."""
    resume: RunState | None = None
    until: int | None = None
    """See `RunSlice`."""
    handover_s: float | None = None
    """Interval in seconds at which the leader reports the state; None: only after the last step,
    as always."""
    preview_s: float | None = None
    """Shortest interval in seconds at which the leader reports estimated latents; None: never."""
    generation: int = 0
    """Required rendezvous of the worker; 0: any, or none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """Report from a worker after a step."""

    run_id: str
    """See `RunTask`."""
    place: int
    """Place of the worker in the group, 0 for the leader."""
    record: StepRecord
    denoised: torch.Tensor | None = None
    """[B, 16, T, h, w] float32 on the CPU, from the leader when it is due; see
    `RunTask.preview_s`."""
    state: RunState | None = None
    """State after the step, from the leader when it is due; see `RunTask.handover_s`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """Result of a worker after a task. The transport raises errors instead."""

    timeline: Timeline
    gathered_bytes: int = 0
    """Bytes received from other workers in this task: velocities, tokens and weight shards."""


def package_versions() -> dict[str, str]:
    """Return the versions in this process by package. The driver and all workers share them."""
    return {
        "WanStream": VERSION,
        # `torch.__version__` compares as a version: 2.13.0 would equal "2.13".
        "torch": str(torch.__version__),
        "diffusers": version("diffusers"),
        "Python": platform.python_version(),
    }


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Worker properties, read by the driver before it sends a task."""

    pid: int
    node: str
    """The machine's host name, for messages. Cloned machines may share one."""
    address: str
    """Address for other workers."""
    device: str
    """The process's device: "cuda:0" or "cpu"."""
    versions: Mapping[str, str]
    """See `package_versions`."""
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    """Weight bytes for requested paths (see `weight_bytes`); None for a missing path."""
    tile_bytes: int = 0
    """Device memory for a decode: free memory, and memory that experts release. Workers on a CPU
    share their machine's RAM."""
    generation: int = 0
    """The worker's rendezvous; 0 outside a rendezvous."""
    auto_dtype: str = "float32"
    """Dtype on this worker for experts with `compute_dtype` "auto"."""
    multiplied: tuple[CodeFormat, ...] = ()
    """Code formats that this worker can multiply as they are stored."""
    machine: str = ""
    """Machine identifier. Workers with the same one share RAM and page cache."""
    link_bytes_per_s: int = 0
    """Network speed for `address` in bytes per second, as reported by the card; 0 if it reports
    none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeTask:
    """Videos to decode, or one tile from a video."""

    run_id: str = ""
    """Unique for every try."""
    vae: Path
    """VAE file or folder, as a path on the driver's machine."""
    latents: torch.Tensor
    """[B, C, T, h, w], raw latents on the CPU; B is 1 for a tile."""
    dtype: torch.dtype = torch.float32
    """Compute dtype of the VAE."""
    latent_scale: str = BY_FILE_NAME
    """One of `LATENT_SCALES`, for a tiny VAE."""
    paths: tuple[PathMap, ...] = ()
    """Maps from the path to the worker's machine."""


class DecodeCancelled(Cancelled):
    """The decode was stopped before a latent frame. The worker can decode again immediately."""
