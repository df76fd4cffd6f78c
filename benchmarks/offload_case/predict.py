"""Simulated runs: from the measured machine, and from a shorter measured run."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wanstream.devices import compute_device
from wanstream.host.machine_profile import measure_machine
from wanstream.plan import BlockCosts, Machine
from wanstream.plan.predict import predict
from wanstream.plan.programs import compile_program, compile_ram, plan_ram, step_visits
from wanstream.plan.programs.simulator import Hardware, simulate
from wanstream.schema import OffloadPolicy, plan_residency
from wanstream.schema.records import Timeline
from wanstream.shapes import RunShape, StepShape

from .model_files import EXPERTS
from .shapes import CaseShape
from .task import Task

LANES = 2


def measure(task: Task) -> None:
    """Measure this machine for the task's blocks and tokens, and write `task.report`."""
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
    """Compile and simulate the task's run as WanStream's planner does."""
    variant = task.case_variant
    assert variant.policy is not None
    figures = Machine.from_dict(json.loads(machine.read_text(encoding="utf-8")))
    costs = _run_shape(task.case, variant.storage).costs(figures, variant.policy.chunk_tokens)
    return predict(costs, variant.policy).timeline


def _run_shape(case: CaseShape, storage: str) -> RunShape:
    block_bytes = case.widths.streamed_bytes()
    blocks = BlockCosts(
        stacks=EXPERTS,
        blocks=case.widths.blocks,
        stored_bytes=block_bytes,
        file_bytes=block_bytes,
        computed_bytes=block_bytes,
    )
    if storage == "fp8":
        stored = case.widths.streamed_bytes(bytes_per_weight=1)
        blocks = replace(blocks, stored_bytes=stored, decoded_bytes=stored)
    return RunShape(
        expert=case.widths,
        blocks=blocks,
        steps=tuple(StepShape(expert=expert) for expert in case.request().step_plan.experts),
        video_tokens=case.tokens,
        sides=dict.fromkeys(EXPERTS, LANES),
    )


def longer_run(measured: dict[str, Any], *, blocks: int, longer: int) -> dict[str, Any]:
    """Simulate a layerwise run with `longer` blocks from a measured timeline with `blocks`.

    Compute and copy times per block are as in the measured run. The time outside the blocks is
    unchanged.
    """
    timeline = Timeline.from_dict(measured)
    experts = [step.expert for step in timeline.steps]
    compute_s = {
        expert: statistics.median(
            step.compute_s for step in timeline.steps if step.expert == expert
        )
        / blocks
        for expert in set(experts)
    }
    outside_s = statistics.median(
        step.wall_s - step.compute_s - step.stall_s for step in timeline.steps
    )
    block_bytes = max(step.bytes_moved for step in timeline.steps) // blocks
    # Only a run that stalled measures the bus. Otherwise one block per visit is a lower bound for
    # the rate.
    stalled = [step for step in timeline.steps[1:] if step.stall_s > 0.05 * step.wall_s]
    rate = min(
        (step.bytes_moved / step.wall_s for step in stalled),
        default=block_bytes / min(compute_s.values()),
    )
    counts = dict.fromkeys(compute_s, longer)
    policy = OffloadPolicy.layerwise(source="pinned")
    residency, buffers = plan_residency(policy, counts)
    hardware = Hardware(
        bus_bytes_per_s=rate,
        block_bytes=block_bytes,
        visit_s=compute_s,
        step_overhead_s=max(0.0, outside_s),
        disk_bytes_per_s=rate,
        file_bytes=0,  # the measured blocks came from RAM
    )
    program = compile_program(step_visits(experts, counts), residency, buffers)
    ram = compile_ram(program, plan_ram(policy, residency, counts), staging=0)
    simulated = simulate(program, hardware, ram)
    return {
        "blocks": longer,
        "bus_gb_per_s": round(rate / 1e9, 2),
        "bus_was_the_limit": bool(stalled),
        "step_s": [round(step.wall_s, 3) for step in simulated.steps],
        "stall_s": [round(step.stall_s, 3) for step in simulated.steps],
    }
