"""References to models and workers by value, and their parsing from text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from .mesh import Mesh
from .step_strengths import StepRange, StepStrengths

Storage = Literal["as stored", "fp8", "int8 ConvRot"]
"""Form of the blocks in RAM and on the bus."""

CodeFormat = Literal["int8", "fp8"]
"""Format of matrices that can be multiplied as they are stored."""
Arithmetic = Literal["auto", "decoded", "as stored", "int8", "fp8"]
"""Multiplication by matrices that are stored in int8 and fp8: decoded to the compute dtype, or those of both formats or
of one of them as they are."""

KernelSet = Literal["auto", "triton", "torch", "comfy-kitchen", "exact"]
"""Kernels for norms, residuals and the rotary embedding. "auto": the fastest ones of the device."""

Attention = Literal["default", "sdpa", "cudnn", "flash", "flash 3", "sage", "int8", "xformers"]
"""Attention backend; "default" is the choice of diffusers."""


@dataclass(frozen=True, kw_only=True)
class LoraRef:
    """Reference to one LoRA or a pair of them: one file per expert, None for an expert without one."""

    high_noise: Path | None = None
    low_noise: Path | None = None
    strength_high: float = 1.0
    strength_low: float = 1.0
    steps: tuple[StepRange, ...] = ()
    """Strengths of both files in ranges of steps, in place of the two above; they share no step."""

    @property
    def high(self) -> StepStrengths:
        """Strength of the high-noise file in each step."""
        return StepStrengths(usual=self.strength_high, ranges=self.steps)

    @property
    def low(self) -> StepStrengths:
        """Strength of the low-noise file in each step."""
        return StepStrengths(usual=self.strength_low, ranges=self.steps)


@dataclass(frozen=True, kw_only=True)
class ExpertsRef:
    """Reference to a pair of experts, or to a single expert, by value: hashable and comparable."""

    high_noise: Path
    """File of the high-noise expert; with `low_noise` None, a diffusers pipeline folder that contains both experts,
    or, with `single`, the only expert."""
    low_noise: Path | None = None
    compute_dtype: str = "auto"
    """torch's name of a dtype. "auto" chooses a fast one for the device, the same for all workers of a run."""
    storage: Storage = "as stored"
    arithmetic: Arithmetic = "decoded"
    loras: tuple[LoraRef, ...] = ()
    """LoRAs added to the experts' weights, all of them."""
    single: bool = False
    """True for a model of one expert, which runs every step."""
    kernels: KernelSet = "auto"
    attention: Attention = "default"
    compile: bool = False
    """True to compile the blocks with `torch.compile`."""

    @property
    def strength_ranges(self) -> tuple[tuple[str, StepRange], ...]:
        """Ranges of steps with a LoRA strength of their own, each after the name of the LoRA's file."""
        files = ((lora, file) for lora in self.loras for file in (lora.high_noise, lora.low_noise) if file is not None)
        return tuple((file.name, each) for lora, file in files for each in lora.steps)

    @property
    def opened(self) -> ExpertsRef:
        """Copy without the options that may change from run to run while the experts stay open."""
        return replace(self, loras=(), kernels="auto", attention="default", compile=False)


IN_PROCESS = "in-process"
LOCAL = "local"

WeightPlacement = Literal["auto", "full", "sharded", "sharded in VRAM"]
"""Placement of the weights in a worker group: a full copy per worker, or one shard each, gathered block by block."""
WHOLE_WEIGHTS: WeightPlacement = "full"
SHARDED: WeightPlacement = "sharded"
ON_DEVICE: WeightPlacement = "sharded in VRAM"
WEIGHT_PLACEMENTS: tuple[WeightPlacement, ...] = ("auto", "full", "sharded", "sharded in VRAM")


Goal = Literal["latency", "throughput"]
"""Goal of a layout that the planner chooses."""
GOALS: tuple[Goal, ...] = ("latency", "throughput")


@dataclass(frozen=True, kw_only=True)
class PathMap:
    """A folder on this machine and the folder with the same files on a worker's machine; both absolute."""

    here: str
    there: str


@dataclass(frozen=True, kw_only=True)
class WorkersRef:
    """Workers and their layout. Equal references share the same workers and the experts that these have open."""

    count: int
    """Number of workers; 1 computes like a run without workers."""
    mesh: Mesh | None = None
    """Layout of the workers; None: the planner chooses one for the run and `goal`."""
    goal: Goal = "latency"
    address: str = LOCAL
    """`IN_PROCESS` (one worker, in this process), `LOCAL` (a private Ray on this machine), or the address of a running
    Ray cluster ("host:port"). Never taken from a graph: see `clusters`."""
    token_file: str = ""
    """File with the token of the cluster, which is sent to `address` only; empty: no token is sent."""
    weights: WeightPlacement = "auto"
    paths: tuple[PathMap, ...] = ()
    """Path maps for workers on other machines: each worker uses the first whose target exists, else the local path."""
    threads: int | None = None
    """CPU threads of each worker; None: the cores of the machine divided by its workers."""
    beyond_loopback: bool = False
    """True if workers may listen on addresses that other machines can reach; needed for a remote cluster, and refused
    without its token."""
    max_restarts: int = 3
    """Number of losses after which each worker group is restarted within an hour. 0: the first loss ends a run."""
    timeout_s: float = 300.0
    """Seconds that a worker waits for the others of its group before it reports a hang."""


ARROW = "->"
HEADS = 40
"""Attention heads of Wan2.2 A14B, for checks before the experts are open."""


class WorkersError(ValueError):
    """Invalid description of workers; the message says why, and what to write instead."""


def path_maps(text: str) -> tuple[PathMap, ...]:
    """Parse one `here -> there` per line, both absolute; empty lines are skipped.

    Raises WorkersError, which names the line.
    """
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
            raise WorkersError(f"line {number} of the path map: {part!r} is not an absolute path; start it at the root")
    here, there = parts
    return PathMap(here=here, there=there)


def check_count(count: int, address: str, *, gpus: int | None, most: int) -> None:
    """Raise WorkersError for fewer workers than one, or more than the machine can run.

    Args:
        count: requested number of workers.
        address: address as in `WorkersRef`.
        gpus: visible GPUs of this machine; None: the workers compute on its CPU.
        most: largest number allowed at any address.
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
    """Raise WorkersError for a layout with another number of workers, or one that does not divide the heads."""
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
    """Format the reference as text: `2 workers, local: cfg 2`."""
    count = f"{ref.count} worker{'s' * (ref.count != 1)}"
    return f"{count}, {ref.address}: {ref.goal if ref.mesh is None else ref.mesh}"
