"""`wanstream plan --workers`: layouts for one video and for many, and the predicted run of one worker."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from ..bench import Table
from ..plan import (
    Budgets,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    choose_layout,
    describe_layout,
    describe_policy,
    describe_ram,
    plan_offload,
    worker_share,
)
from ..schema import Mesh, size_text
from .arguments import ArgumentError
from .exit_codes import DONE, FAILED, INVALID
from .plan_arguments import PlanArguments, requested_budgets


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A layout for a number of videos, and the plan of one of its workers for one video."""

    videos: int
    mesh: Mesh
    worker: OffloadPlan


def plan_workers(arguments: PlanArguments, job: OffloadJob, machine: Machine) -> int:
    """Print the proposed layouts, or JSON, and return the exit code."""
    try:
        _check(arguments)
        counts = dict.fromkeys((1, arguments.videos))
        proposals = [_propose(arguments, job, machine, requested_budgets(arguments), videos) for videos in counts]
    except DoesNotFitError as err:
        print(f"does not fit, because {err}", file=sys.stderr)
        return FAILED
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    print(_json(machine, proposals) if arguments.json else _table(arguments, job, machine, proposals))
    return DONE


def _propose(arguments: PlanArguments, job: OffloadJob, machine: Machine, budgets: Budgets, videos: int) -> Proposal:
    assert arguments.workers is not None
    here = arguments.gpus_per_node
    mesh = choose_layout(arguments.workers, job, machine, budgets, samples=videos, workers_per_machine=here)
    share = worker_share(mesh, job, machine, budgets, workers_per_machine=here)
    return Proposal(videos=videos, mesh=mesh, worker=plan_offload(share.job, share.machine, share.budgets))


def _table(arguments: PlanArguments, job: OffloadJob, machine: Machine, proposals: list[Proposal]) -> str:
    header = ("videos", "layout", "each worker", "weights", "one video", "VRAM")
    rows = [
        (
            str(each.videos),
            str(each.mesh),
            describe_policy(each.worker.policy, job.expert.blocks),
            describe_ram(each.worker.policy),
            f"{each.worker.total_s:.1f} s",
            size_text(each.worker.device_bytes),
        )
        for each in proposals
    ]
    return "\n".join(
        [
            f"{arguments.workers} workers with {machine.name}, up to {arguments.gpus_per_node} on a machine with "
            f"{size_text(machine.ram_bytes)} of RAM ({machine.origin})",
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


def _check(arguments: PlanArguments) -> None:
    for option, count in (
        ("--workers", arguments.workers),
        ("--gpus-per-node", arguments.gpus_per_node),
        ("--videos", arguments.videos),
    ):
        if count is not None and count < 1:
            raise ArgumentError(f"{option} {count}: give 1 or more")
    if arguments.compare:
        raise ArgumentError("--compare plans a single worker: omit it, or --workers")
