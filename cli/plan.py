"""`wanstream plan`: what a run is predicted to take on a machine, owned or not. Everything printed is simulated."""

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
from .plan_arguments import PlanArguments, asked_budgets, asked_machine, asked_value_bytes, offload_job
from .plan_workers import plan_workers

SHOWN = 8
"""Candidates that get a row of their own."""


def plan(arguments: PlanArguments) -> int:
    """Print the predicted table, or JSON, and return the exit code."""
    try:
        offload_job(arguments)  # refuses what cannot be planned before this machine is measured
        machine, budgets = asked_machine(arguments), asked_budgets(arguments)
        job = offload_job(arguments, value_bytes=asked_value_bytes(arguments))
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
    ways = plan_alternatives(job, machine, budgets) if arguments.compare else ()
    if arguments.json:
        print(plan_json(machine, chosen, ways))
        return DONE
    print(plan_table(job, machine, chosen))
    if ways:
        print(ways_table(ways))
    return DONE


def plan_table(job: OffloadJob, machine: Machine, chosen: OffloadPlan) -> str:
    """A row per candidate worth showing, the best first, then what does not fit, then the reason."""
    header = ("on the device", "in RAM", "tokens at once", "total", "per step", "stall", "VRAM", "RAM", "switch")
    rows = tuple(_row(job, candidate) for candidate in shown(job, chosen))
    misfits = {_words(job, misfit.policy): misfit.why for misfit in chosen.misfits}
    return "\n".join(
        [
            f"simulated for {machine.name}, {size_text(machine.ram_bytes)} of RAM, files at "
            f"{rate_text(machine.disk_bytes_per_s)} ({machine.origin})",
            Table(head=header, rows=rows).text(),
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
        way = (policy.kind, quarter, policy.source, policy.ram_blocks is None)
        best.setdefault(way, candidate)
    return list(best.values())[:SHOWN]


def ways_table(ways: Sequence[Alternative]) -> str:
    """A row per way that fits, the fastest per video first, then why the others do not."""
    header = ("other ways", "per video", "whole run", "VRAM", "RAM")
    rows = tuple(
        (
            way.words,
            f"{way.video_s:.1f} s",
            f"{way.plan.total_s:.1f} s",
            size_text(way.plan.device_bytes),
            size_text(way.plan.host_bytes),
        )
        for way in ways
        if way.plan is not None
    )
    lacking = [f"does not fit: {way.words}, because {way.why_not}" for way in ways if way.plan is None]
    return "\n".join([Table(head=header, rows=rows).text(), *lacking])


def plan_json(machine: Machine, chosen: OffloadPlan, ways: Sequence[Alternative] = ()) -> str:
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


def _way(way: Alternative) -> dict[str, Any]:
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
    return f"{describe_policy(policy, job.expert.blocks)}, {describe_ram(policy)}"
