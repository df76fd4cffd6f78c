"""`wanstream plan --workers`: the proposed meshes, and what they are predicted to take. All of it is simulated."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from ..plan import DoesNotFitError, FleetRun, Links, Machine, MeshPlan, OffloadJob, expected_links, propose_mesh
from ..plan.figure_words import share_text, size_text
from ..plan.links import known_links
from ..plan.memory_needs import VRAM_RESERVE, VRAM_SHARE
from .aligned import aligned
from .exit_codes import DONE, FAILED, INVALID
from .plan_arguments import GB, PlanArguments
from .sizes import SizeError

SHOWN = 4
"""Layouts that get a row, for each purpose."""


def plan_workers(arguments: PlanArguments, job: OffloadJob, machine: Machine) -> int:
    """Print the proposed meshes, or JSON, and return the exit code."""
    try:
        links = _links(arguments, machine)
        given = _with_vram(arguments, machine)
        workers = arguments.workers or 0
        plans = [propose_mesh(workers, job, given, links, videos) for videos in dict.fromkeys((1, arguments.videos))]
    except DoesNotFitError as err:
        print(f"does not fit, because {err}", file=sys.stderr)
        return FAILED
    except ValueError as err:
        print(err, file=sys.stderr)
        return INVALID
    print(meshes_json(machine, links, plans) if arguments.json else meshes_table(machine, links, plans))
    return DONE


def meshes_table(machine: Machine, links: Links, plans: list[MeshPlan]) -> str:
    """For each purpose a row per layout worth showing, the proposed one first; then the reasons."""
    header = (
        "videos",
        "layout",
        "done in",
        "per video",
        "busy",
        "wait for others",
        "wait for weights",
        "weights",
        "VRAM",
    )
    rows = [_row(run) for plan in plans for run in plan.candidates[:SHOWN]]
    workers = plans[0].mesh.size
    misfits = {str(mesh): why for plan in plans for mesh, why in plan.misfits}
    return "\n".join(
        [
            f"simulated for {workers} worker{'s' * (workers != 1)} with {machine.name}, up to "
            f"{links.workers_per_machine} on a machine with {size_text(machine.ram_bytes)} of RAM and files at "
            f"{machine.disk_bytes_per_s / GB:.2f} GB/s ({machine.origin}), over {links.name} ({links.origin})",
            aligned([header, *rows], left=2),
            *(f"does not fit: {layout}, because {why}" for layout, why in misfits.items()),
            *(f"best for {_purpose(plan)}: {plan.reason}" for plan in plans),
        ]
    )


def meshes_json(machine: Machine, links: Links, plans: list[MeshPlan]) -> str:
    """The whole result as JSON."""
    return json.dumps(
        {
            "kind": "simulated",
            "machine": machine.to_dict(),
            "links": asdict(links),
            "proposals": [
                {
                    "videos": plan.run.videos,
                    "mesh": asdict(plan.mesh),
                    "weights": plan.weights,
                    "alone_s": plan.alone_s,
                    "reason": plan.reason,
                    "candidates": [_figures(run) for run in plan.candidates],
                    "fewer": None if plan.fewer is None else _figures(plan.fewer),
                    "does_not_fit": [{"mesh": asdict(mesh), "because": why} for mesh, why in plan.misfits],
                }
                for plan in plans
            ],
        },
        indent=2,
    )


def _row(run: FleetRun) -> tuple[str, ...]:
    whole_s = run.makespan_s * len(run.loads)
    return (
        str(run.videos),
        str(run.mesh),
        f"{run.makespan_s:.1f} s",
        f"{run.video_s:.1f} s",
        share_text(run.busy_share),
        share_text(sum(load.exchange_s for load in run.loads) / whole_s),
        share_text(sum(load.stall_s for load in run.loads) / whole_s),
        ", ".join(dict.fromkeys(stage.weights for stage in run.stages)),
        size_text(max(stage.device_bytes for stage in run.stages)),
    )


def _figures(run: FleetRun) -> dict[str, Any]:
    return {
        "mesh": asdict(run.mesh),
        "makespan_s": run.makespan_s,
        "first_video_s": run.first_video_s,
        "video_s": run.video_s,
        "busy_share": run.busy_share,
        "stages": [{**asdict(stage), "steps": [stage.steps.start, stage.steps.stop]} for stage in run.stages],
        "loads": [asdict(load) for load in run.loads],
    }


def _purpose(plan: MeshPlan) -> str:
    return "one video now" if plan.run.videos == 1 else f"{plan.run.videos} videos"


def _links(arguments: PlanArguments, machine: Machine) -> Links:
    for option, count in (("--workers", arguments.workers), ("--per-machine", arguments.per_machine)):
        if count is not None and count < 1:
            raise SizeError(f"{option} {count}: give 1 or more")
    if arguments.videos < 1:
        raise SizeError(f"--videos {arguments.videos}: give 1 or more")
    if arguments.ways:
        raise SizeError("--ways is about one worker: leave it out, or --workers")
    if arguments.link is None:
        return expected_links(machine, workers_per_machine=arguments.per_machine)
    return replace(known_links(arguments.link), workers_per_machine=arguments.per_machine)


def _with_vram(arguments: PlanArguments, machine: Machine) -> Machine:
    """`machine` with a GPU of which a run takes by itself what --vram says."""
    if arguments.vram_gb is None:
        return machine
    return replace(machine, vram_bytes=int((arguments.vram_gb * GB + VRAM_RESERVE) / VRAM_SHARE))
