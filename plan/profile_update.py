"""What a measured first step says about the machine that the plan was made for."""

from __future__ import annotations

import math
from dataclasses import replace

from ..schema import StepRecord
from .machine import Machine
from .offload_job import OffloadJob
from .planner import OffloadPlan
from .predict import predict, read_seconds, visit_seconds

AGREES = 0.02
"""Share of a step by which measured and simulated stall may differ and still be the same."""
NEAR = 0.001
"""Share of a step by which they may still differ when a rate was found."""
LARGEST_CHANGE = 64.0
CORRECTED = ", corrected by a first step"
HALVINGS = 24


def updated_machine(machine: Machine, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> Machine:
    """`machine` as the first step of `plan` shows it to be.

    `measured` is the record of step 0 of `job`, from an engine that began empty. The time of its computing gives
    `flops_per_s`. Where it then waited longer, or less long, than a simulation of it does, the slower of the two ways
    to the device, disk or bus, gets the rate with which the simulation agrees. A step that did not wait says only how
    fast they are at least. Raises ValueError when `measured` is not such a step.
    """
    job = _of_first_step(job)
    first = plan.timeline.steps[0]
    if (measured.index, measured.expert) != (first.index, first.expert):
        raise ValueError(
            f"step {measured.index} of the {measured.expert} expert was measured; "
            f"the plan begins with step {first.index} of {first.expert}"
        )
    if not measured.compute_s > 0:
        raise ValueError(f"the measured step computed for {measured.compute_s} s: nothing can be learned from it")
    found = replace(machine, flops_per_s=_flops_per_s(machine, job, plan, measured))
    for field in _ways(found, job, measured):
        found = _with_rate(found, field, _rate(found, field, job, plan, measured))
    return replace(found, origin=machine.origin.removesuffix(CORRECTED) + CORRECTED)


def _flops_per_s(machine: Machine, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> float:
    """The rate with which this step computes as long as it did; what more chunks cost is left out of it."""
    chunk = plan.policy.chunk_tokens
    lanes, blocks = job.lanes[measured.expert], job.expert.blocks
    added_s = visit_seconds(job, machine, measured.expert, chunk) - visit_seconds(job, machine, measured.expert, None)
    visit_s = measured.compute_s / blocks
    flops = lanes * job.expert.block_flops(job.tokens)
    return flops / max(visit_s - added_s, visit_s / 2)


def _of_first_step(job: OffloadJob) -> OffloadJob:
    """The job of the first step alone, with the lanes that it has."""
    lanes = dict(job.lanes)
    if job.lanes_of_steps:
        lanes[job.experts_of_steps[0]] = job.lanes_of_steps[0]
    return replace(job, experts_of_steps=job.experts_of_steps[:1], lanes=lanes, lanes_of_steps=())


def _first_step(machine: Machine, job: OffloadJob, plan: OffloadPlan) -> StepRecord:
    return predict(job, machine, plan.policy).timeline.steps[0]


def _ways(machine: Machine, job: OffloadJob, measured: StepRecord) -> list[str]:
    """The rates of disk and bus, first the one that this step waits for longer."""
    bus = "copy_bytes_per_s" if machine.computes_on == "cpu" else "h2d_bytes_per_s"
    disk_s = measured.read_bytes / job.file_bytes * read_seconds(job, machine)
    ways = ["disk_bytes_per_s", bus]
    return ways if disk_s >= measured.bytes_moved / getattr(machine, bus) else ways[::-1]


def _rate(machine: Machine, field: str, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> float:
    """The rate nearest to that of `machine` with which the simulated step waits as long as the measured one did."""
    rate: float = getattr(machine, field)

    def stall_s(factor: float) -> float:
        return _first_step(_with_rate(machine, field, rate * factor), job, plan).stall_s

    present_s = stall_s(1.0)
    if abs(present_s - measured.stall_s) <= AGREES * measured.wall_s:
        return rate
    too_slow = present_s > measured.stall_s
    far = LARGEST_CHANGE if too_slow else 1 / LARGEST_CHANGE
    # Where something else is in the way, no rate will do: then the one beyond which nothing changes.
    reachable_s = stall_s(far)
    near_s = NEAR * measured.wall_s
    wanted_s = max(measured.stall_s, reachable_s) + near_s if too_slow else min(measured.stall_s, reachable_s) - near_s
    if (present_s > wanted_s) != too_slow:
        return rate
    near = 1.0
    for _ in range(HALVINGS):
        middle = math.sqrt(near * far)
        near, far = (middle, far) if (stall_s(middle) > wanted_s) == too_slow else (near, middle)
    return rate * far


def _with_rate(machine: Machine, field: str, rate: float) -> Machine:
    return Machine.from_dict({**machine.to_dict(), field: rate})
