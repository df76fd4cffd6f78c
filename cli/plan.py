"""`wanstream plan`: predicts a run on a machine, owned or not. Every figure is simulated."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..bench import Table
from ..plan import (
    BlockCosts,
    Budgets,
    Candidate,
    DoesNotFitError,
    Machine,
    OffloadPlan,
    describe_policy,
    describe_ram,
    expected_machine,
    plan_offload,
)
from ..schema import OffloadPolicy
from ..schema.text import error_text, format_rate, format_size
from ..shapes import (
    BF16_BYTES,
    PIXELS_PER_LATENT,
    T2V_A14B,
    TI2V_5B,
    WAN22_PIXELS_PER_LATENT,
    ExpertShape,
    RunShape,
    StepShape,
)
from .alternatives import Alternative, in_fp8, in_int8, plan_alternatives
from .arguments import DONE, FAILED, INVALID, ArgumentError, measured_device, read_json, video_shape
from .model_file import FileRun, read_model_file, tokens_of
from .options import MachineOptions, MeasuredOptions, PlanOptions
from .terminal import print_note

GB = 1e9
GIB = 2**30
QUANTISED = {"fp8": in_fp8, "int8 ConvRot": in_int8}
"""Storages quantised from a bf16 file on arrival."""
# 32 Q8_0 weights take a byte each and a 2-byte scale. K types pack 256 weights.
GGUF = {"Q8_0": 34 / 32, "Q5_K": 176 / 256, "Q4_K": 144 / 256}
"""Bytes per weight in GGUF storages."""
BF16 = ("bfloat16", BF16_BYTES)
"""Name of a compute dtype, and bytes per value."""
GUIDED = {"both": (2, 2), "high": (2, 1), "none": (1, 1)}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan a run for."""

    expert: ExpertShape
    places: tuple[str, ...]
    """Names of the experts."""
    per_latent: int
    """Pixels per latent pixel along each side."""


MODELS = {
    "a14b": PlannedModel(expert=T2V_A14B, places=("high", "low"), per_latent=PIXELS_PER_LATENT),
    "5b": PlannedModel(expert=TI2V_5B, places=("high",), per_latent=WAN22_PIXELS_PER_LATENT),
}


def planned_run(options: PlanOptions, *, dtype: tuple[str, int] = BF16) -> RunShape | FileRun:
    """Return the run from the command line, for a model file or for Wan's experts.

    Raises ArgumentError, and CheckpointFileError for a file that cannot be read.
    """
    if options.file is not None:
        return file_run(options, options.file)
    if options.tokens is not None:
        raise ArgumentError(f"--tokens {options.tokens}: give a FILE, or omit it")
    return run_shape(options, dtype=dtype)


def file_run(options: PlanOptions, file: Path) -> FileRun:
    """Return the run for any diffusion model, in the file's formats.

    Raises ArgumentError, and CheckpointFileError for a file that cannot be read.
    """
    refused = {
        "--model": options.model != "a14b",
        "--switch-step": options.switch_step is not None,
        "--storage": options.storage != "bf16",
        "--compare": options.compare,
        "--workers": options.fleet.workers is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ArgumentError(f"{name} is for Wan's experts: omit it with a FILE, or the FILE")
    if options.steps < 1:
        raise ArgumentError(f"--steps {options.steps}: give at least 1 step")
    tokens = tokens_of(options.size)
    if tokens is None:
        raise ArgumentError(
            f"--size {options.size}: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, for example "
            "1024x1024"
        )
    return FileRun(
        model=read_model_file(file),
        tokens=options.tokens or tokens,
        # A model in a file is one expert, so the first number counts.
        lanes=GUIDED[options.cfg][0],
        steps=tuple(range(options.steps)),
    )


def run_shape(options: PlanOptions, *, dtype: tuple[str, int] = BF16) -> RunShape:
    """Return the run from the command line, computed in a dtype with this name and size.

    Raises ArgumentError.
    """
    compute_dtype, value_bytes = dtype
    model = MODELS[options.model]
    video = video_shape(options.size, per_latent=model.per_latent)
    expert = model.expert
    computed = expert.streamed_bytes(bytes_per_weight=value_bytes)
    stored = int(expert.streamed_parameters * GGUF.get(options.storage, BF16_BYTES))
    blocks = BlockCosts(
        stacks=model.places,
        blocks=expert.blocks,
        stored_bytes=stored,
        file_bytes=stored,
        computed_bytes=computed,
        # 0 if the blocks are copied as they are.
        decoded_bytes=(stored != computed) * stored,
        outside_bytes=len(model.places) * expert.resident_bytes() * value_bytes // BF16_BYTES,
    )
    # A single-expert model has the guidance of the one entry in `places`.
    lanes = dict(zip(("high", "low"), GUIDED[options.cfg], strict=True))
    experts = _steps(options, single="low" not in model.places)
    run = RunShape(
        expert=expert,
        blocks=blocks,
        steps=tuple(StepShape(expert=place) for place in experts),
        video_tokens=video.tokens,
        sides={place: lanes[place] for place in model.places},
        value_bytes=value_bytes,
        compute_dtype=compute_dtype,
    )
    if options.storage in QUANTISED:
        return QUANTISED[options.storage](run)
    return run


def _steps(options: PlanOptions, *, single: bool) -> tuple[str, ...]:
    """Return the expert of each step. Raises ArgumentError."""
    steps = options.steps
    switch = options.switch_step
    if single and switch is not None:
        raise ArgumentError(
            f"--switch-step {switch}: {options.model} has a single expert: omit the option"
        )
    high = steps // 2
    if single:
        high = steps
    elif switch is not None:
        high = switch
    if steps < 1 or not 0 <= high <= steps:
        raise ArgumentError(
            f"--steps {steps} --switch-step {high}: give at least 1 step, and a switch step from 0 "
            "to that number"
        )
    return ("high",) * high + ("low",) * (steps - high)


def requested_machine(options: PlanOptions) -> Machine:
    """Return the machine for `--gpu`. "this" is measured if it has no profile.

    Raises ValueError and OSError.
    """
    asked = options.machine
    if asked.gpu == "this" or asked.gpu.endswith(".json"):
        return _measured_machine(asked, options.measured)
    if asked.ram_gb is None or asked.ssd_gb_s is None:
        raise ArgumentError("give --ram GB and --ssd GB/s of that machine, or --gpu this")
    if not (0 < asked.ram_gb < math.inf and 0 < asked.ssd_gb_s < math.inf):
        raise ArgumentError(
            f"--ram {asked.ram_gb} --ssd {asked.ssd_gb_s}: both must be numbers above 0"
        )
    return expected_machine(
        asked.gpu, ram_bytes=int(asked.ram_gb * GIB), disk_bytes_per_s=asked.ssd_gb_s * GB
    )


def planned_dtype(options: PlanOptions) -> tuple[str, int]:
    """Return name and bytes for `compute_dtype` auto.

    Machines other than this one are assumed to have bf16.
    """
    if options.machine.gpu != "this":
        return BF16
    from ..devices import auto_dtype, dtype_name

    dtype = auto_dtype(options.measured.device)
    return dtype_name(dtype), dtype.itemsize


def _measured_machine(asked: MachineOptions, measured: MeasuredOptions) -> Machine:
    # A measurement takes seconds, so wrong options are refused first.
    _check_positive("--ram", asked.ram_gb)
    _check_positive("--ssd", asked.ssd_gb_s)
    if asked.gpu == "this":
        from ..host import load_machine_profile

        device = measured_device(measured.device, measured.models)
        machine = load_machine_profile(device, models=measured.models)
    else:
        machine = _machine_in(Path(asked.gpu))
    if asked.ram_gb is not None:
        machine = replace(machine, ram_bytes=int(asked.ram_gb * GIB))
    if asked.ssd_gb_s is not None:
        machine = replace(machine, disk_bytes_per_s=asked.ssd_gb_s * GB)
    return machine


def _machine_in(path: Path) -> Machine:
    """Return the machine in a file from `wanstream selftest` or `wanstream probe --json`.

    Raises ArgumentError.
    """
    data = read_json(path)
    # A probe has the machine at the top, a self-test among its figures.
    for found in (data, data.get("figures") if isinstance(data, dict) else None):
        if isinstance(found, dict) and isinstance(found.get("machine"), dict):
            try:
                return Machine.from_dict(found["machine"])
            except (ValueError, TypeError) as err:
                raise ArgumentError(f"--gpu {path}: {err}") from err
    raise ArgumentError(
        f"--gpu {path} has no measured machine: give a file of `wanstream selftest` whose check "
        "`rates` has passed, or of `wanstream probe --json`"
    )


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ArgumentError(f"{option} {value}: it must be a number above 0")


def _check_fleet(options: PlanOptions) -> None:
    """Raise ArgumentError for conflicting options, or counts below 1."""
    fleet = options.fleet
    for option, count in (
        ("--workers", fleet.workers),
        ("--gpus-per-node", fleet.gpus_per_node),
        ("--videos", fleet.videos),
    ):
        if count is not None and count < 1:
            raise ArgumentError(f"{option} {count}: give 1 or more")
    if options.compare:
        raise ArgumentError("--compare plans a single worker: omit it, or --workers")


def _plan_workers(
    options: PlanOptions, workers: int, run: RunShape, machine: Machine, budgets: Budgets
) -> str:
    """Return the layouts for one video and for several as a table or JSON. Raises ValueError."""
    _check_fleet(options)
    from ..distributed import choose_layout, describe_layout, worker_share

    here = options.fleet.gpus_per_node
    proposals = []
    rows = []
    reasons = []
    # Once if --videos is 1.
    for videos in dict.fromkeys((1, options.fleet.videos)):
        mesh = choose_layout(
            workers, run, machine, budgets, samples=videos, workers_per_machine=here
        )
        share = worker_share(mesh, run, machine, budgets, workers_per_machine=here)
        worker = plan_offload(share.run, share.machine, share.budgets)
        reason = describe_layout(mesh)
        proposals.append(
            {
                "videos": videos,
                "mesh": asdict(mesh),
                "reason": reason,
                "policy": asdict(worker.policy),
                "video_s_without_exchanges": worker.total_s,
                "device_bytes": worker.device_bytes,
                "host_bytes": worker.host_bytes,
            }
        )
        rows.append(
            (
                str(videos),
                str(mesh),
                describe_policy(worker.policy, run.blocks.blocks),
                describe_ram(worker.policy),
                f"{worker.total_s:.1f} s",
                format_size(worker.device_bytes),
            )
        )
        purpose = {1: "one video"}.get(videos, f"{videos} videos")
        reasons.append(f"{purpose}: {reason}")
    if options.json:
        data = {"kind": "simulated", "machine": machine.to_dict(), "proposals": proposals}
        return json.dumps(data, indent=2)
    header = ("videos", "layout", "each worker", "weights", "one video", "VRAM")
    return "\n".join(
        [
            f"{workers} workers with {machine.name}, up to {here} on a machine with "
            f"{format_size(machine.ram_bytes)} of RAM ({machine.origin})",
            Table(head=header, rows=tuple(rows)).text(),
            *reasons,
            "layouts follow the rule in docs/scaling.md; seconds are simulated for one worker and "
            "its share of one video, without communication between workers",
        ]
    )


MAX_ROWS = 8
"""Maximum number of candidates in the table."""
PLAN_FIGURES = ("total_s", "device_bytes", "host_bytes", "reason")
CANDIDATE_FIGURES = ("total_s", "stall_s", "switch_s", "device_bytes", "host_bytes")
"""Figures in JSON for the chosen plan and for every candidate."""


def plan(options: PlanOptions) -> int:
    """Print the predicted table, or JSON, and return the exit code."""
    try:
        planned_run(options)  # refuses invalid options before this machine is measured
        machine = requested_machine(options)
        _check_positive("--vram", options.vram_gb)
        budgets = Budgets(vram_bytes=None if options.vram_gb is None else int(options.vram_gb * GB))
        run = planned_run(options, dtype=planned_dtype(options))
        if isinstance(run, RunShape) and options.fleet.workers is not None:
            print(_plan_workers(options, options.fleet.workers, run, machine, budgets))
        else:
            print(_plan_one(options, run, machine, budgets))
    # DoesNotFitError is a ValueError with another exit code, so it comes first.
    except DoesNotFitError as err:
        print_note(f"does not fit, because {err}")
        return FAILED
    except ValueError as err:
        print_note(err)
        return INVALID
    except OSError as err:
        print_note(f"failed: {error_text(err)}")
        return FAILED
    return DONE


def _plan_one(
    options: PlanOptions, run: RunShape | FileRun, machine: Machine, budgets: Budgets
) -> str:
    """Return the plan for a run on one GPU as a table or JSON. Raises DoesNotFitError."""
    chosen = plan_offload(run, machine, budgets)
    alternatives: Sequence[Alternative] = ()
    if options.compare and isinstance(run, RunShape):
        alternatives = plan_alternatives(run, machine, budgets)
    if options.json:
        return plan_json(machine, chosen, alternatives)
    table = plan_table(run, machine, chosen)
    if isinstance(run, FileRun):
        table = f"{run.model.describe()}\n{table}\n{queue_line(run, machine, chosen)}"
    if not alternatives:
        return table
    return f"{table}\n{alternatives_table(alternatives)}"


def queue_line(run: FileRun, machine: Machine, chosen: OffloadPlan) -> str:
    """Return the seconds for each phase from Queue to the latent, for an uncached file."""
    outside = run.model.outside_bytes
    open_s = outside / machine.disk_bytes_per_s
    steps = [step.wall_s for step in chosen.timeline.steps]
    return (
        f"from Queue: open {open_s:.1f} s ({format_size(outside)} outside the blocks), first step "
        f"{steps[0]:.1f} s, all {len(steps)} {chosen.total_s:.1f} s, latent after "
        f"{open_s + chosen.total_s:.1f} s; the times of text encoder and VAE are not in it"
    )


def plan_table(run: RunShape | FileRun, machine: Machine, chosen: OffloadPlan) -> str:
    """Return the best candidates as a table, policies that do not fit, and the choice's reason."""
    rows = [_row(run, candidate) for candidate in best_candidates(run, chosen)]
    misfits = {_describe(run, misfit.policy): misfit.shortage for misfit in chosen.misfits}
    return "\n".join(
        [
            f"simulated for {machine.name}, {format_size(machine.ram_bytes)} of RAM, files at "
            f"{format_rate(machine.disk_bytes_per_s)} ({machine.origin}); "
            f"{run.describe_arithmetic(machine)}",
            Table(head=tuple(rows[0]), rows=tuple(tuple(row.values()) for row in rows)).text(),
            *(f"does not fit: {words}, because it {why}" for words, why in misfits.items()),
            f"best: {_describe(run, chosen.policy)}: {chosen.reason}",
        ]
    )


def best_candidates(run: RunShape | FileRun, chosen: OffloadPlan) -> list[Candidate]:
    """Return the best candidate for each combination of device and RAM use, fastest first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in chosen.candidates:
        policy = candidate.policy
        # By quarters: the table would otherwise list many similar numbers of blocks.
        quarter = -(-policy.blocks_to_swap * 4 // run.blocks.blocks)
        key = (policy.kind, quarter, policy.source, policy.ram_blocks is None)
        best.setdefault(key, candidate)
    return list(best.values())[:MAX_ROWS]


def alternatives_table(alternatives: Sequence[Alternative]) -> str:
    """Return a row per fitting alternative, in their order, then reasons for the others."""
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
    lacking = [
        f"does not fit: {each.words}, because {each.why_not}"
        for each in alternatives
        if each.plan is None
    ]
    return "\n".join([Table(head=header, rows=rows).text(), *lacking])


def plan_json(machine: Machine, chosen: OffloadPlan, alternatives: Sequence[Alternative]) -> str:
    """Return the whole result as JSON, with the alternatives if there are any."""
    data: dict[str, Any] = {
        "kind": "simulated",
        "machine": machine.to_dict(),
        **_figures(chosen, PLAN_FIGURES),
        "candidates": [_figures(each, CANDIDATE_FIGURES) for each in chosen.candidates],
        "does_not_fit": [
            {"policy": asdict(misfit.policy), "because": misfit.shortage}
            for misfit in chosen.misfits
        ],
        "timeline": chosen.timeline.to_dict(),
    }
    if alternatives:
        data["ways"] = [_alternative(each) for each in alternatives]
    return json.dumps(data, indent=2)


def _row(run: RunShape | FileRun, candidate: Candidate) -> dict[str, str]:
    """Return a candidate's cells by column head."""
    policy = candidate.policy
    return {
        "on the device": describe_policy(policy, run.blocks.blocks),
        "in RAM": describe_ram(policy),
        "tokens at once": str(policy.chunk_tokens or "all"),
        "total": f"{candidate.total_s:.1f} s",
        "per step": f"{candidate.total_s / len(run.steps):.2f} s",
        "stall": f"{100 * candidate.stall_s / candidate.total_s:.1f} %",
        "VRAM": format_size(candidate.device_bytes),
        "RAM": format_size(candidate.host_bytes),
        "switch": f"+{candidate.switch_s:.1f} s",
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    way: dict[str, Any] = {"way": alternative.words, "videos": alternative.videos}
    if alternative.plan is None:
        return way | {"because": alternative.why_not}
    return way | {"video_s": alternative.video_s} | _figures(alternative.plan, PLAN_FIGURES)


def _figures(candidate: Candidate, names: Sequence[str]) -> dict[str, Any]:
    figures = {name: getattr(candidate, name) for name in names}
    return {"policy": asdict(candidate.policy), **figures}


def _describe(run: RunShape | FileRun, policy: OffloadPolicy) -> str:
    return f"{describe_policy(policy, run.blocks.blocks)}, {describe_ram(policy)}"
