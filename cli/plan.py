"""`wanstream plan`: predicts a run on a machine, owned or not; every figure is simulated."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..bench import Table
from ..plan import (
    Alternative,
    Budgets,
    Candidate,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    choose_layout,
    describe_layout,
    describe_policy,
    describe_precision,
    describe_ram,
    expected_machine,
    plan_alternatives,
    plan_offload,
    worker_share,
)
from ..schema import (
    BF16_BYTES,
    PIXELS_PER_LATENT,
    T2V_A14B,
    TI2V_5B,
    WAN22_PIXELS_PER_LATENT,
    ExpertShape,
    Mesh,
    OffloadPolicy,
    Storage,
    format_rate,
    format_size,
)
from .arguments import DONE, FAILED, INVALID, ArgumentError, error_text, measured_device, read_json, video_shape
from .options import PlanOptions

GB = 1e9
GIB = 2**30
INT8 = "int8 ConvRot"
"""Storage that is quantised from a bf16 file on arrival, and multiplied as it is stored."""
STORAGES = {"bf16": 2.0, "fp8": 1.0, "Q8_0": 34 / 32, "Q5_K": 176 / 256, "Q4_K": 144 / 256}
"""Bytes per weight in the other storages; fp8 is quantised from a bf16 file on arrival, the Q formats are GGUF."""
BF16 = ("bfloat16", BF16_BYTES)
"""Name of a compute dtype, and its bytes per value."""
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


def offload_job(options: PlanOptions, *, dtype: tuple[str, int] = BF16) -> OffloadJob:
    """Return the job of the command line, computed in a dtype of this name and size. Raises ArgumentError."""
    compute_dtype, value_bytes = dtype
    model = MODELS[options.model]
    video = video_shape(options.size, per_latent=model.per_latent)
    expert = model.expert
    int8 = options.storage == INT8
    quantised_to: Storage = "int8 ConvRot" if int8 else "fp8" if options.storage == "fp8" else "as stored"
    stored = expert.int8_bytes() if int8 else int(expert.streamed_parameters * STORAGES[options.storage])
    computed = stored if int8 else expert.streamed_bytes(bytes_per_weight=value_bytes)
    # A single-expert model has the guidance of its one entry in `places`.
    lanes = dict(zip(("high", "low"), GUIDED[options.cfg], strict=True))
    return OffloadJob(
        expert=expert,
        tokens=video.tokens,
        lanes={place: lanes[place] for place in model.places},
        experts_of_steps=_steps(options, single="low" not in model.places),
        stored_bytes=stored,
        file_bytes=stored if quantised_to == "as stored" else expert.streamed_bytes(),
        computed_bytes=computed,
        resident_bytes=len(model.places) * expert.resident_bytes() * value_bytes // BF16_BYTES,
        value_bytes=value_bytes,
        compute_dtype=compute_dtype,
        linear_format="int8" if int8 else "",
        quantised_to=quantised_to,
    )


def _steps(options: PlanOptions, *, single: bool) -> tuple[str, ...]:
    """Return the expert of each step. Raises ArgumentError."""
    steps, switch = options.steps, options.switch_step
    if single and switch is not None:
        raise ArgumentError(f"--switch-step {switch}: {options.model} has a single expert: omit the option")
    high = steps if single else steps // 2 if switch is None else switch
    if steps < 1 or not 0 <= high <= steps:
        raise ArgumentError(
            f"--steps {steps} --switch-step {high}: give at least 1 step, and a switch step from 0 to that number"
        )
    return ("high",) * high + ("low",) * (steps - high)


def requested_machine(options: PlanOptions) -> Machine:
    """Return the machine of `--gpu`; "this" is measured if it has no profile. Raises ValueError and OSError."""
    if options.gpu == "this" or options.gpu.endswith(".json"):
        return _measured_machine(options)
    if options.ram_gb is None or options.ssd_gb_s is None:
        raise ArgumentError("give --ram GB and --ssd GB/s of that machine, or --gpu this")
    if not (0 < options.ram_gb < math.inf and 0 < options.ssd_gb_s < math.inf):
        raise ArgumentError(f"--ram {options.ram_gb} --ssd {options.ssd_gb_s}: both must be numbers above 0")
    return expected_machine(options.gpu, ram_bytes=int(options.ram_gb * GIB), disk_bytes_per_s=options.ssd_gb_s * GB)


def planned_dtype(options: PlanOptions) -> tuple[str, int]:
    """Return name and bytes of `compute_dtype` auto; machines other than this one are assumed to have bf16."""
    if options.gpu != "this":
        return BF16
    from ..devices import auto_dtype, dtype_name

    dtype = auto_dtype(options.device)
    return dtype_name(dtype), dtype.itemsize


def _measured_machine(options: PlanOptions) -> Machine:
    _check_positive("--ram", options.ram_gb)
    _check_positive("--ssd", options.ssd_gb_s)
    if options.gpu == "this":
        from ..host import load_machine_profile

        device = measured_device(options.device, options.models)
        machine = load_machine_profile(device, models=options.models)
    else:
        machine = _machine_in(Path(options.gpu))
    if options.ram_gb is not None:
        machine = replace(machine, ram_bytes=int(options.ram_gb * GIB))
    if options.ssd_gb_s is not None:
        machine = replace(machine, disk_bytes_per_s=options.ssd_gb_s * GB)
    return machine


def _machine_in(path: Path) -> Machine:
    """Return the machine in a file of `wanstream selftest` or `wanstream probe --json`. Raises ArgumentError."""
    data = read_json(path)
    for found in (data, data.get("figures") if isinstance(data, dict) else None):
        if isinstance(found, dict) and isinstance(found.get("machine"), dict):
            try:
                return Machine.from_dict(found["machine"])
            except (ValueError, TypeError) as err:
                raise ArgumentError(f"--gpu {path}: {err}") from err
    raise ArgumentError(
        f"--gpu {path} has no measured machine: give a file of `wanstream selftest` whose check `rates` has passed, or "
        "of `wanstream probe --json`"
    )


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ArgumentError(f"{option} {value}: it must be a number above 0")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A layout for a number of videos, and the plan of one of its workers for one video."""

    videos: int
    mesh: Mesh
    worker: OffloadPlan


def _plan_workers(options: PlanOptions, workers: int, job: OffloadJob, machine: Machine, budgets: Budgets) -> str:
    """Return the proposed layouts as a table or JSON. Raises ValueError."""
    _check(options)
    here = options.gpus_per_node
    proposals = []
    for videos in dict.fromkeys((1, options.videos)):
        mesh = choose_layout(workers, job, machine, budgets, samples=videos, workers_per_machine=here)
        share = worker_share(mesh, job, machine, budgets, workers_per_machine=here)
        worker = plan_offload(share.job, share.machine, share.budgets)
        proposals.append(Proposal(videos=videos, mesh=mesh, worker=worker))
    return _json(machine, proposals) if options.json else _table(options, job, machine, proposals)


def _table(options: PlanOptions, job: OffloadJob, machine: Machine, proposals: list[Proposal]) -> str:
    header = ("videos", "layout", "each worker", "weights", "one video", "VRAM")
    rows = [
        (
            str(each.videos),
            str(each.mesh),
            describe_policy(each.worker.policy, job.expert.blocks),
            describe_ram(each.worker.policy),
            f"{each.worker.total_s:.1f} s",
            format_size(each.worker.device_bytes),
        )
        for each in proposals
    ]
    return "\n".join(
        [
            f"{options.workers} workers with {machine.name}, up to {options.gpus_per_node} on a machine with "
            f"{format_size(machine.ram_bytes)} of RAM ({machine.origin})",
            Table(head=header, rows=tuple(rows)).text(),
            *(f"{_purpose(each.videos)}: {describe_layout(each.mesh)}" for each in proposals),
            "layouts follow the rule in docs/scaling.md; seconds are simulated for one worker and its share of one "
            "video, without communication between workers",
        ]
    )


def _json(machine: Machine, proposals: list[Proposal]) -> str:
    return json.dumps(
        {
            "kind": "simulated",
            "machine": machine.to_dict(),
            "proposals": [
                {
                    "videos": each.videos,
                    "mesh": asdict(each.mesh),
                    "reason": describe_layout(each.mesh),
                    "policy": asdict(each.worker.policy),
                    "video_s_without_exchanges": each.worker.total_s,
                    "device_bytes": each.worker.device_bytes,
                    "host_bytes": each.worker.host_bytes,
                }
                for each in proposals
            ],
        },
        indent=2,
    )


def _purpose(videos: int) -> str:
    return "one video" if videos == 1 else f"{videos} videos"


def _check(options: PlanOptions) -> None:
    for option, count in (
        ("--workers", options.workers),
        ("--gpus-per-node", options.gpus_per_node),
        ("--videos", options.videos),
    ):
        if count is not None and count < 1:
            raise ArgumentError(f"{option} {count}: give 1 or more")
    if options.compare:
        raise ArgumentError("--compare plans a single worker: omit it, or --workers")


MAX_ROWS = 8
"""Maximum number of candidates in the table."""


def plan(options: PlanOptions) -> int:
    """Print the predicted table, or JSON, and return the exit code."""
    try:
        offload_job(options)  # refuses invalid options before this machine is measured
        machine = requested_machine(options)
        _check_positive("--vram", options.vram_gb)
        budgets = Budgets(vram_bytes=None if options.vram_gb is None else int(options.vram_gb * GB))
        job = offload_job(options, dtype=planned_dtype(options))
        if options.workers is not None:
            print(_plan_workers(options, options.workers, job, machine, budgets))
        else:
            print(_plan_one(options, job, machine, budgets))
    except DoesNotFitError as err:
        print(f"does not fit, because {err}", file=sys.stderr)
        return FAILED
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    except OSError as err:
        print(f"failed: {error_text(err)}", file=sys.stderr)
        return FAILED
    return DONE


def _plan_one(options: PlanOptions, job: OffloadJob, machine: Machine, budgets: Budgets) -> str:
    """Return the plan of a run on one GPU as a table or JSON. Raises DoesNotFitError."""
    chosen = plan_offload(job, machine, budgets)
    alternatives = plan_alternatives(job, machine, budgets) if options.compare else ()
    if options.json:
        return plan_json(machine, chosen, alternatives)
    table = plan_table(job, machine, chosen)
    return f"{table}\n{alternatives_table(alternatives)}" if alternatives else table


def plan_table(job: OffloadJob, machine: Machine, chosen: OffloadPlan) -> str:
    """Return the table of the best candidates, then the policies that do not fit, then the reason of the choice."""
    header = ("on the device", "in RAM", "tokens at once", "total", "per step", "stall", "VRAM", "RAM", "switch")
    rows = tuple(_row(job, candidate) for candidate in best_candidates(job, chosen))
    misfits = {_describe(job, misfit.policy): misfit.shortage for misfit in chosen.misfits}
    return "\n".join(
        [
            f"simulated for {machine.name}, {format_size(machine.ram_bytes)} of RAM, files at "
            f"{format_rate(machine.disk_bytes_per_s)} ({machine.origin}); {describe_precision(job, machine)}",
            Table(head=header, rows=rows).text(),
            *(f"does not fit: {words}, because it {why}" for words, why in misfits.items()),
            f"best: {_describe(job, chosen.policy)}: {chosen.reason}",
        ]
    )


def best_candidates(job: OffloadJob, chosen: OffloadPlan) -> list[Candidate]:
    """Return the best candidate of each combination of device and RAM use, the fastest first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in chosen.candidates:
        policy = candidate.policy
        quarter = -(-policy.blocks_to_swap * 4 // job.expert.blocks)
        key = (policy.kind, quarter, policy.source, policy.ram_blocks is None)
        best.setdefault(key, candidate)
    return list(best.values())[:MAX_ROWS]


def alternatives_table(alternatives: Sequence[Alternative]) -> str:
    """Return a row per alternative that fits, in their order, then the reasons of the others."""
    header = ("alternative", "per video", "whole run", "VRAM", "RAM")
    rows = tuple(
        (
            each.words,
            f"{each.video_s:.1f} s",
            f"{each.plan.total_s:.1f} s",
            format_size(each.plan.device_bytes),
            format_size(each.plan.host_bytes),
        )
        for each in alternatives
        if each.plan is not None
    )
    lacking = [f"does not fit: {each.words}, because {each.why_not}" for each in alternatives if each.plan is None]
    return "\n".join([Table(head=header, rows=rows).text(), *lacking])


def plan_json(machine: Machine, chosen: OffloadPlan, alternatives: Sequence[Alternative]) -> str:
    """Return the whole result as JSON, with the alternatives if there are any."""
    data: dict[str, Any] = {
        "kind": "simulated",
        "machine": machine.to_dict(),
        **_figures(chosen),
        "candidates": [asdict(candidate) for candidate in chosen.candidates],
        "does_not_fit": [{"policy": asdict(misfit.policy), "because": misfit.shortage} for misfit in chosen.misfits],
        "timeline": chosen.timeline.to_dict(),
    }
    if alternatives:
        data["ways"] = [_alternative(each) for each in alternatives]
    return json.dumps(data, indent=2)


def _row(job: OffloadJob, candidate: Candidate) -> tuple[str, ...]:
    policy = candidate.policy
    return (
        describe_policy(policy, job.expert.blocks),
        describe_ram(policy),
        "all" if policy.chunk_tokens is None else str(policy.chunk_tokens),
        f"{candidate.total_s:.1f} s",
        f"{candidate.total_s / len(job.experts_of_steps):.2f} s",
        f"{100 * candidate.stall_s / candidate.total_s:.1f} %",
        format_size(candidate.device_bytes),
        format_size(candidate.host_bytes),
        f"+{candidate.switch_s:.1f} s",
    )


def _alternative(alternative: Alternative) -> dict[str, Any]:
    if alternative.plan is None:
        return {"way": alternative.words, "videos": alternative.videos, "because": alternative.why_not}
    way = {"way": alternative.words, "videos": alternative.videos, "video_s": alternative.video_s}
    return {**way, **_figures(alternative.plan)}


def _figures(plan: OffloadPlan) -> dict[str, Any]:
    names = ("total_s", "device_bytes", "host_bytes", "reason")
    return {"policy": asdict(plan.policy), **{name: getattr(plan, name) for name in names}}


def _describe(job: OffloadJob, policy: OffloadPolicy) -> str:
    return f"{describe_policy(policy, job.expert.blocks)}, {describe_ram(policy)}"
