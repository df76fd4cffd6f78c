"""WanStream's own prediction of a run, from this machine as it was measured in the same session."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from wanstream.devices import compute_device
from wanstream.host.machine_profile import measure_machine
from wanstream.plan import Machine, OffloadJob
from wanstream.plan.predict import predict
from wanstream.schema import Timeline

from .model_files import EXPERTS
from .shapes import CaseShape
from .task import Task

LANES = 2


def measure(task: Task) -> None:
    """Measure this machine for the blocks and tokens of the task's shape, and write it to `task.report`."""
    torch.set_num_threads(task.threads)
    report = Path(task.report)
    profile = measure_machine(
        compute_device(task.device),
        expert=task.case.widths,
        tokens=task.case.tokens,
        models=task.experts_folder,
        folder=report.parent / "profile",
    )
    report.write_text(json.dumps(profile.machine.to_dict(), indent=2), encoding="utf-8")


def predicted_timeline(task: Task, machine: Path) -> Timeline:
    """Compile and simulate the run of the task as WanStream's planner does."""
    way = task.way
    assert way.policy is not None
    figures = Machine.from_dict(json.loads(machine.read_text(encoding="utf-8")))
    return predict(_job(task.case, way.storage), figures, way.policy).timeline


def _job(case: CaseShape, storage: str) -> OffloadJob:
    block_bytes = case.widths.streamed_bytes()
    return OffloadJob(
        expert=case.widths,
        tokens=case.tokens,
        lanes=dict.fromkeys(EXPERTS, LANES),
        experts_of_steps=case.request().step_plan.experts,
        stored_bytes=case.widths.streamed_bytes(bytes_per_weight=1) if storage == "fp8" else block_bytes,
        file_bytes=block_bytes,
        computed_bytes=block_bytes,
        resident_bytes=0,
    )
