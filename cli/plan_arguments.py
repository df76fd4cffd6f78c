"""Arguments of `wanstream plan`, and the planner's inputs: job, machine and budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..plan import Budgets, Machine, OffloadJob, expected_machine
from ..schema import BF16_BYTES, PIXELS_PER_LATENT, T2V_A14B, TI2V_5B, WAN22_PIXELS_PER_LATENT, ExpertShape
from .arguments import ArgumentError, video_shape

GB = 1e9
GIB = 2**30
STORAGES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32, "Q5_K": 176 / 256, "Q4_K": 144 / 256}
"""Bytes per stored weight; fp8 is quantised from a bf16 file on arrival, the Q formats are GGUF."""
GUIDED = {"both": (2, 2), "high": (2, 1), "none": (1, 1)}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan a run for."""

    expert: ExpertShape
    places: tuple[str, ...]
    """Names of its experts."""
    per_latent: int
    """Number of pixels per latent pixel along each side."""


MODELS = {
    "a14b": PlannedModel(expert=T2V_A14B, places=("high", "low"), per_latent=PIXELS_PER_LATENT),
    "5b": PlannedModel(expert=TI2V_5B, places=("high",), per_latent=WAN22_PIXELS_PER_LATENT),
}


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Arguments of the command line."""

    gpu: str
    ram_gb: float | None
    """In units of 2^30 bytes, as memory is sold; all other GB are 10^9 bytes."""
    ssd_gb_s: float | None
    size: str
    model: str = "a14b"
    """One of `MODELS`."""
    steps: int = 20
    switch_step: int | None = None
    """First step of the low-noise expert; None: half of the steps."""
    cfg: str = "both"
    storage: str = "bf16"
    vram_gb: float | None = None
    models: Path | None = None
    device: str | None = None
    workers: int | None = None
    """Number of workers to choose layouts for; None: plan one run on one GPU."""
    gpus_per_node: int = 8
    """Workers on one machine."""
    videos: int = 100
    """Number of videos for the layout with the best throughput."""
    compare: bool = False
    """Also plan other storage formats and several videos per run."""
    json: bool = False


def offload_job(arguments: PlanArguments, *, value_bytes: int = BF16_BYTES) -> OffloadJob:
    """Return the job of the command line, computed in values of `value_bytes` bytes. Raises ArgumentError."""
    model = MODELS[arguments.model]
    video = video_shape(arguments.size, per_latent=model.per_latent)
    expert = model.expert
    stored = int(expert.streamed_parameters * STORAGES[arguments.storage])
    computed = expert.streamed_bytes(bytes_per_weight=value_bytes)
    # A single-expert model has the guidance of its one entry in `places`.
    lanes = dict(zip(("high", "low"), GUIDED[arguments.cfg], strict=True))
    return OffloadJob(
        expert=expert,
        tokens=video.tokens,
        lanes={place: lanes[place] for place in model.places},
        experts_of_steps=_steps(arguments, single="low" not in model.places),
        stored_bytes=stored,
        file_bytes=expert.streamed_bytes() if arguments.storage == "fp8" else stored,
        computed_bytes=computed,
        resident_bytes=len(model.places) * expert.resident_bytes() * value_bytes // BF16_BYTES,
        value_bytes=value_bytes,
    )


def _steps(arguments: PlanArguments, *, single: bool) -> tuple[str, ...]:
    """Return the expert of each step. Raises ArgumentError."""
    steps, switch = arguments.steps, arguments.switch_step
    if single and switch is not None:
        raise ArgumentError(f"--switch-step {switch}: {arguments.model} has a single expert: omit the option")
    high = steps if single else steps // 2 if switch is None else switch
    if steps < 1 or not 0 <= high <= steps:
        raise ArgumentError(
            f"--steps {steps} --switch-step {high}: give at least 1 step, and a switch step from 0 to that number"
        )
    return ("high",) * high + ("low",) * (steps - high)


def requested_machine(arguments: PlanArguments) -> Machine:
    """Return the machine of `--gpu`; "this" is measured if it has no profile. Raises ValueError and OSError."""
    if arguments.gpu == "this":
        return _this_machine(arguments)
    if arguments.ram_gb is None or arguments.ssd_gb_s is None:
        raise ArgumentError("give --ram GB and --ssd GB/s of that machine, or --gpu this")
    if not (0 < arguments.ram_gb < math.inf and 0 < arguments.ssd_gb_s < math.inf):
        raise ArgumentError(f"--ram {arguments.ram_gb} --ssd {arguments.ssd_gb_s}: both must be numbers above 0")
    return expected_machine(
        arguments.gpu, ram_bytes=int(arguments.ram_gb * GIB), disk_bytes_per_s=arguments.ssd_gb_s * GB
    )


def planned_value_bytes(arguments: PlanArguments) -> int:
    """Return the bytes per value of `compute_dtype` auto; machines other than this one are assumed to have bf16."""
    if arguments.gpu != "this":
        return BF16_BYTES
    from ..devices import auto_dtype

    return auto_dtype(arguments.device).itemsize


def _this_machine(arguments: PlanArguments) -> Machine:
    import torch  # takes seconds, and plans for other machines do not need it

    from ..devices import DeviceError, compute_device
    from ..host import load_machine_profile

    try:
        device = compute_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except DeviceError as err:
        raise ArgumentError(str(err)) from err
    if arguments.models is not None and not arguments.models.exists():
        raise ArgumentError(f"--models {arguments.models}: no such file or folder")
    for option, value in (("--ram", arguments.ram_gb), ("--ssd", arguments.ssd_gb_s)):
        if value is not None and not 0 < value < math.inf:
            raise ArgumentError(f"{option} {value}: it must be a number above 0")
    machine = load_machine_profile(device, models=arguments.models)
    if arguments.ram_gb is not None:
        machine = replace(machine, ram_bytes=int(arguments.ram_gb * GIB))
    if arguments.ssd_gb_s is not None:
        machine = replace(machine, disk_bytes_per_s=arguments.ssd_gb_s * GB)
    return machine


def requested_budgets(arguments: PlanArguments) -> Budgets:
    """Return the memory budgets of the run. Raises ArgumentError."""
    if arguments.vram_gb is not None and not 0 < arguments.vram_gb < math.inf:
        raise ArgumentError(f"--vram {arguments.vram_gb}: it must be a number above 0")
    return Budgets(vram_bytes=None if arguments.vram_gb is None else int(arguments.vram_gb * GB))
