"""Correction of a machine's rates by the measured first step of a plan."""

from __future__ import annotations

import math
from dataclasses import replace

from ..schema import StepRecord
from .machine import Machine
from .offload_job import OffloadJob
from .planner import OffloadPlan
from .predict import equivalent_flops, predict, read_seconds, visit_seconds

STALL_TOLERANCE = 0.02
"""Difference between measured and simulated stall, as a share of the step, up to which a rate is kept."""
SEARCH_TOLERANCE = 0.001
"""Difference that may remain after the search for a new rate, as a share of the step."""
LARGEST_CHANGE = 64.0
"""Largest factor by which a rate is changed."""
CORRECTED = ", corrected by a first step"
BISECTIONS = 24


def calibrate_machine(machine: Machine, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> Machine:
    """Return `machine` with its rates corrected by the first step of `plan`.

    Its compute time gives `flops_per_s`. If its stall differs from the simulated one, the slower route to the device,
    disk or bus, gets the rate for which the simulation agrees, and then the other one. A step without stall gives a
    lower bound of these rates only.

    Args:
        machine: the machine that the plan was made for.
        job: the run that was planned.
        plan: the plan of `job` on `machine`.
        measured: record of step 0 of `job`, from an engine that started with empty buffers and RAM.

    Raises:
        ValueError: if `measured` is another step, or has no compute time.
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
    found = _with_speedup(machine, job, plan, measured)
    if found is None:
        found = replace(machine, flops_per_s=_flops_per_s(machine, job, plan, measured))
    for field in _transfer_rates(found, job, measured):
        found = _with_rate(found, field, _rate(found, field, job, plan, measured))
    return replace(found, origin=machine.origin.removesuffix(CORRECTED) + CORRECTED)


def _with_speedup(machine: Machine, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> Machine | None:
    """Return `machine` with the speed-up of linear layers that explains the step's compute time.

    None if the speed-up of the job's format is known, or if none explains the time: then the rate of a block has to.
    """
    if not job.linear_format or job.linear_format in machine.linear_speedups:
        return None
    # Without a speed-up, equivalent flops are all flops: in the measured time, this many pass at the known rate.
    lane_tokens = job.lane_tokens(measured.expert)
    whole, linear = equivalent_flops(job, machine, lane_tokens), sum(map(job.expert.linear_flops, lane_tokens))
    passed = whole * machine.flops_per_s / _flops_per_s(machine, job, plan, measured)
    left = passed - (whole - linear)
    if left <= 0:
        return None
    return replace(machine, linear_speedups={**machine.linear_speedups, job.linear_format: linear / left})


def _flops_per_s(machine: Machine, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> float:
    """Return the rate that explains the step's compute time, without the time that chunks add."""
    chunk, blocks = plan.policy.chunk_tokens, job.expert.blocks
    added_s = visit_seconds(job, machine, measured.expert, chunk) - visit_seconds(job, machine, measured.expert, None)
    visit_s = measured.compute_s / blocks
    flops = equivalent_flops(job, machine, job.lane_tokens(measured.expert))
    # The chunk cost is an estimate: never let it explain more than half of the measured time.
    return flops / max(visit_s - added_s, visit_s / 2)


def _of_first_step(job: OffloadJob) -> OffloadJob:
    """Return the job of the first step alone, with its own number of lanes."""
    lanes, sides, expert = dict(job.lanes), dict(job.sides), job.experts_of_steps[0]
    if job.lanes_of_steps:
        lanes[expert] = job.lanes_of_steps[0]
    if job.sides_of_steps:
        sides[expert] = job.sides_of_steps[0]
    return replace(job.of_steps(range(1)), lanes=lanes, sides=sides, lanes_of_steps=(), sides_of_steps=())


def _transfer_rates(machine: Machine, job: OffloadJob, measured: StepRecord) -> list[str]:
    """Return the field names of the disk and the bus rate, the one that takes longer in this step first."""
    bus = "copy_bytes_per_s" if machine.computes_on == "cpu" else "h2d_bytes_per_s"
    disk_s = measured.read_bytes / job.file_bytes * read_seconds(job, machine)
    fields = ["disk_bytes_per_s", bus]
    return fields if disk_s >= measured.bytes_moved / getattr(machine, bus) else fields[::-1]


def _rate(machine: Machine, field: str, job: OffloadJob, plan: OffloadPlan, measured: StepRecord) -> float:
    """Return the rate nearest to that of `machine` for which the simulated stall equals the measured one."""
    rate: float = getattr(machine, field)

    def stall_s(factor: float) -> float:
        tried = _with_rate(machine, field, rate * factor)
        return predict(job, tried, plan.policy).timeline.steps[0].stall_s

    present_s = stall_s(1.0)
    if abs(present_s - measured.stall_s) <= STALL_TOLERANCE * measured.wall_s:
        return rate
    too_slow = present_s > measured.stall_s
    far = LARGEST_CHANGE if too_slow else 1 / LARGEST_CHANGE
    # If another resource limits the step, no rate reproduces the stall: then find the rate beyond which it is constant.
    reachable_s = stall_s(far)
    near_s = SEARCH_TOLERANCE * measured.wall_s
    wanted_s = max(measured.stall_s, reachable_s) + near_s if too_slow else min(measured.stall_s, reachable_s) - near_s
    if (present_s > wanted_s) != too_slow:
        return rate
    near = 1.0
    for _ in range(BISECTIONS):
        # The geometric mean, because rates span orders of magnitude.
        middle = math.sqrt(near * far)
        near, far = (middle, far) if (stall_s(middle) > wanted_s) == too_slow else (near, middle)
    return rate * far


def _with_rate(machine: Machine, field: str, rate: float) -> Machine:
    return Machine.from_dict({**machine.to_dict(), field: rate})
