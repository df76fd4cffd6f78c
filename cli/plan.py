"""`wanstream plan`: what a run is predicted to take on a machine, owned or not. Everything printed is simulated."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..plan import (
    T2V_A14B,
    Budgets,
    Candidate,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    OffloadPolicy,
    plan_offload,
)
from ..plan.choices import Choice, plan_choices
from ..plan.figure_words import size_text
from ..plan.gpus import expected_machine
from ..plan.plan_reason import policy_words, ram_words
from .aligned import aligned
from .exit_codes import DONE, FAILED, INVALID
from .sizes import SizeError, video_shape

GB = 1e9
GIB = 2**30
STORAGES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32, "Q5_K": 176 / 256, "Q4_K": 144 / 256}
"""Bytes per stored weight; fp8 is quantised from a bf16 file on arrival, the Q formats are GGUF."""
GUIDED = {"both": (2, 2), "high": (2, 1), "none": (1, 1)}
SHOWN = 8
"""Candidates that get a row of their own."""


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """What the command line says."""

    gpu: str
    ram_gb: float | None
    """As memory is sold: 2^30 bytes each; all other GB are 10^9 bytes."""
    ssd_gb_s: float | None
    size: str
    steps: int = 20
    switch: int | None = None
    """Steps of the high-noise expert; None: half of them."""
    cfg: str = "both"
    storage: str = "bf16"
    vram_gb: float | None = None
    models: Path | None = None
    device: str | None = None
    ways: bool = False
    """Whether to plan other storage and several videos in one pass too."""
    json: bool = False


def plan(arguments: PlanArguments) -> int:
    """Print the predicted table, or JSON, and return the exit code."""
    try:
        job, machine, budgets = offload_job(arguments), _machine(arguments), _budgets(arguments)
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    except OSError as err:
        print(f"failed: {err}", file=sys.stderr)
        return FAILED
    try:
        chosen = plan_offload(job, machine, budgets)
    except DoesNotFitError as err:
        print(f"does not fit, because {err}", file=sys.stderr)
        return FAILED
    ways = plan_choices(job, machine, budgets) if arguments.ways else ()
    if arguments.json:
        print(plan_json(machine, chosen, ways))
        return DONE
    print(plan_table(job, machine, chosen))
    if ways:
        print(ways_table(ways))
    return DONE


def offload_job(arguments: PlanArguments) -> OffloadJob:
    """The run that the command line describes. Raises SizeError."""
    video = video_shape(arguments.size)
    steps = arguments.steps
    high = steps // 2 if arguments.switch is None else arguments.switch
    if steps < 1 or not 0 <= high <= steps:
        raise SizeError(f"--steps {steps} --switch {high}: there must be a step, and the switch must be among them")
    expert = T2V_A14B
    stored = int(expert.streamed_parameters * STORAGES[arguments.storage])
    computed = expert.streamed_bytes()
    return OffloadJob(
        expert=expert,
        tokens=video.tokens,
        lanes=dict(zip(("high", "low"), GUIDED[arguments.cfg], strict=True)),
        experts_of_steps=("high",) * high + ("low",) * (steps - high),
        stored_bytes=stored,
        file_bytes=computed if arguments.storage == "fp8" else stored,
        computed_bytes=computed,
        staying_bytes=len(GUIDED[arguments.cfg]) * expert.staying_bytes(),
    )


def plan_table(job: OffloadJob, machine: Machine, chosen: OffloadPlan) -> str:
    """A row per candidate worth showing, the best first, then what does not fit, then the reason."""
    header = ("on the device", "in RAM", "tokens at once", "total", "per step", "stall", "VRAM", "RAM", "switch")
    rows = [header, *(_row(job, candidate) for candidate in shown(job, chosen))]
    misfits = {_words(job, misfit.policy): misfit.why for misfit in chosen.misfits}
    return "\n".join(
        [
            f"simulated for {machine.name}, {size_text(machine.ram_bytes)} of RAM, files at "
            f"{machine.disk_bytes_per_s / GB:.2f} GB/s ({machine.origin})",
            aligned(rows, left=3),
            *(f"does not fit: {words}, because it {why}" for words, why in misfits.items()),
            f"best: {_words(job, chosen.policy)}: {chosen.reason}",
        ]
    )


def shown(job: OffloadJob, chosen: OffloadPlan) -> list[Candidate]:
    """The best candidate of every way to use device and RAM, the fastest first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in chosen.candidates:
        policy = candidate.policy
        quarter = -(-policy.blocks_to_swap * 4 // job.expert.blocks)
        way = (policy.kind, quarter, policy.source, policy.ram_rolls, policy.ram_blocks is None)
        best.setdefault(way, candidate)
    return list(best.values())[:SHOWN]


def ways_table(ways: Sequence[Choice]) -> str:
    """A row per way that fits, the fastest per video first, then why the others do not."""
    header = ("other ways", "per video", "whole run", "VRAM", "RAM")
    rows = [
        (
            way.words,
            f"{way.video_s:.1f} s",
            f"{way.plan.total_s:.1f} s",
            size_text(way.plan.device_bytes),
            size_text(way.plan.host_bytes),
        )
        for way in ways
        if way.plan is not None
    ]
    lacking = [f"does not fit: {way.words}, because {way.why_not}" for way in ways if way.plan is None]
    return "\n".join([aligned([header, *rows], left=1), *lacking])


def plan_json(machine: Machine, chosen: OffloadPlan, ways: Sequence[Choice] = ()) -> str:
    """The whole result as JSON; `ways` only where they were asked for."""
    data: dict[str, Any] = {
        "kind": "simulated",
        "machine": machine.to_dict(),
        "policy": asdict(chosen.policy),
        "total_s": chosen.total_s,
        "device_bytes": chosen.device_bytes,
        "host_bytes": chosen.host_bytes,
        "reason": chosen.reason,
        "candidates": [asdict(candidate) for candidate in chosen.candidates],
        "does_not_fit": [{"policy": asdict(misfit.policy), "because": misfit.why} for misfit in chosen.misfits],
        "timeline": chosen.timeline.to_dict(),
    }
    if ways:
        data["ways"] = [_way(way) for way in ways]
    return json.dumps(data, indent=2)


def _row(job: OffloadJob, candidate: Candidate) -> tuple[str, ...]:
    policy = candidate.policy
    return (
        policy_words(policy, job.expert.blocks),
        ram_words(policy),
        "all" if policy.chunk_tokens is None else str(policy.chunk_tokens),
        f"{candidate.total_s:.1f} s",
        f"{candidate.total_s / len(job.experts_of_steps):.2f} s",
        f"{100 * candidate.stall_s / candidate.total_s:.1f} %",
        size_text(candidate.device_bytes),
        size_text(candidate.host_bytes),
        f"+{candidate.switch_s:.1f} s",
    )


def _way(way: Choice) -> dict[str, Any]:
    if way.plan is None:
        return {"way": way.words, "videos": way.videos, "because": way.why_not}
    plan = way.plan
    return {
        "way": way.words,
        "videos": way.videos,
        "video_s": way.video_s,
        "total_s": plan.total_s,
        "policy": asdict(plan.policy),
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "reason": plan.reason,
    }


def _words(job: OffloadJob, policy: OffloadPolicy) -> str:
    return f"{policy_words(policy, job.expert.blocks)}, {ram_words(policy)}"


def _machine(arguments: PlanArguments) -> Machine:
    if arguments.gpu == "this":
        return _this_machine(arguments)
    if arguments.ram_gb is None or arguments.ssd_gb_s is None:
        raise SizeError("give --ram GB and --ssd GB/s of that machine, or --gpu this")
    if not (0 < arguments.ram_gb < math.inf and 0 < arguments.ssd_gb_s < math.inf):
        raise SizeError(f"--ram {arguments.ram_gb} --ssd {arguments.ssd_gb_s}: both must be numbers above 0")
    return expected_machine(
        arguments.gpu, ram_bytes=int(arguments.ram_gb * GIB), disk_bytes_per_s=arguments.ssd_gb_s * GB
    )


def _this_machine(arguments: PlanArguments) -> Machine:
    import torch  # takes seconds, and no other machine needs it

    from ..host.machine_profile import machine_profile
    from ..metrics.device import DeviceError, compute_device

    try:
        device = compute_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except DeviceError as err:
        raise SizeError(str(err)) from err
    if arguments.models is not None and not arguments.models.exists():
        raise SizeError(f"--models {arguments.models}: there is no such file or folder")
    for option, value in (("--ram", arguments.ram_gb), ("--ssd", arguments.ssd_gb_s)):
        if value is not None and not 0 < value < math.inf:
            raise SizeError(f"{option} {value}: it must be a number above 0")
    machine = machine_profile(device, models=arguments.models)
    if arguments.ram_gb is not None:
        machine = replace(machine, ram_bytes=int(arguments.ram_gb * GIB))
    if arguments.ssd_gb_s is not None:
        machine = replace(machine, disk_bytes_per_s=arguments.ssd_gb_s * GB)
    return machine


def _budgets(arguments: PlanArguments) -> Budgets:
    if arguments.vram_gb is not None and not 0 < arguments.vram_gb < math.inf:
        raise SizeError(f"--vram {arguments.vram_gb}: it must be a number above 0")
    return Budgets(vram_bytes=None if arguments.vram_gb is None else int(arguments.vram_gb * GB))
