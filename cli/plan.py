"""`wanstream plan`: simulated time and memory of a run on any machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..bench import Table
from ..plan import (
    Alternative,
    Candidate,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    describe_policy,
    describe_ram,
    plan_alternatives,
    plan_offload,
)
from ..schema import OffloadPolicy, rate_text, size_text
from .exit_codes import DONE, FAILED, INVALID
from .plan_arguments import PlanArguments, offload_job, planned_value_bytes, requested_budgets, requested_machine
from .plan_workers import plan_workers

MAX_ROWS = 8
"""Maximum number of candidates in the table."""


def plan(arguments: PlanArguments) -> int:
    """Print the predicted table, or JSON, and return the exit code."""
    try:
        offload_job(arguments)  # refuses invalid arguments before this machine is measured
        machine, budgets = requested_machine(arguments), requested_budgets(arguments)
        job = offload_job(arguments, value_bytes=planned_value_bytes(arguments))
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    except OSError as err:
        print(f"failed: {err}", file=sys.stderr)
        return FAILED
    if arguments.workers is not None:
        return plan_workers(arguments, job, machine)
    try:
        chosen = plan_offload(job, machine, budgets)
    except DoesNotFitError as err:
        print(f"does not fit, because {err}", file=sys.stderr)
        return FAILED
    alternatives = plan_alternatives(job, machine, budgets) if arguments.compare else ()
    if arguments.json:
        print(plan_json(machine, chosen, alternatives))
        return DONE
    print(plan_table(job, machine, chosen))
    if alternatives:
        print(alternatives_table(alternatives))
    return DONE


def plan_table(job: OffloadJob, machine: Machine, chosen: OffloadPlan) -> str:
    """Return the table of the best candidates, then the policies that do not fit, then the reason of the choice."""
    header = ("on the device", "in RAM", "tokens at once", "total", "per step", "stall", "VRAM", "RAM", "switch")
    rows = tuple(_row(job, candidate) for candidate in best_candidates(job, chosen))
    misfits = {_describe(job, misfit.policy): misfit.why for misfit in chosen.misfits}
    return "\n".join(
        [
            f"simulated for {machine.name}, {size_text(machine.ram_bytes)} of RAM, files at "
            f"{rate_text(machine.disk_bytes_per_s)} ({machine.origin})",
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
            size_text(each.plan.device_bytes),
            size_text(each.plan.host_bytes),
        )
        for each in alternatives
        if each.plan is not None
    )
    lacking = [f"does not fit: {each.words}, because {each.why_not}" for each in alternatives if each.plan is None]
    return "\n".join([Table(head=header, rows=rows).text(), *lacking])


def plan_json(machine: Machine, chosen: OffloadPlan, alternatives: Sequence[Alternative] = ()) -> str:
    """Return the whole result as JSON, with the alternatives if there are any."""
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
        size_text(candidate.device_bytes),
        size_text(candidate.host_bytes),
        f"+{candidate.switch_s:.1f} s",
    )


def _alternative(alternative: Alternative) -> dict[str, Any]:
    if alternative.plan is None:
        return {"way": alternative.words, "videos": alternative.videos, "because": alternative.why_not}
    plan = alternative.plan
    return {
        "way": alternative.words,
        "videos": alternative.videos,
        "video_s": alternative.video_s,
        "total_s": plan.total_s,
        "policy": asdict(plan.policy),
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "reason": plan.reason,
    }


def _describe(job: OffloadJob, policy: OffloadPolicy) -> str:
    return f"{describe_policy(policy, job.expert.blocks)}, {describe_ram(policy)}"
