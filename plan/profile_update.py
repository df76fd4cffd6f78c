"""Machine rates corrected by a plan's measured first step."""

from __future__ import annotations

import math
from dataclasses import replace

from ..schema import OffloadPolicy
from ..schema.records import StepRecord
from .costs import RunModel
from .machine import Machine
from .planner import OffloadPlan
from .predict import predict

STALL_TOLERANCE = 0.02
"""Difference between measured and simulated stall at which a rate is kept, as a share of the
step."""
SEARCH_TOLERANCE = 0.001
"""Difference left after the search for a new rate, as a share of the step."""
LARGEST_CHANGE = 64.0
"""Largest factor by which a rate is changed."""
CORRECTED = ", corrected by a first step"
# Each step halves log2(LARGEST_CHANGE) = 6. After 24 steps the factor is exact to 3e-7.
BISECTIONS = 24


def calibrate_machine(
    machine: Machine, run: RunModel, plan: OffloadPlan, measured: StepRecord
) -> Machine:
    """Return `machine` with rates corrected by the first step of `plan`.

    The step's compute time gives the compute rate. If measured and simulated stall differ, the
    slower route to the device (disk or bus) gets the rate at which the simulation agrees, and then
    the other route. A step without stall gives only a lower bound on these rates.

    Args:
        machine: machine used for the plan.
        run: the planned run.
        plan: plan for `run` on `machine`.
        measured: record of step 0, from an engine started with empty buffers and RAM.

    Raises:
        ValueError: if `measured` is another step, or has no compute time.
    """
    first = plan.timeline.steps[0]
    if (measured.index, measured.expert) != (first.index, first.expert):
        raise ValueError(
            f"step {measured.index} of the {measured.expert} expert was measured; "
            f"the plan begins with step {first.index} of {first.expert}"
        )
    if not measured.compute_s > 0:
        raise ValueError(
            f"the measured step computed for {measured.compute_s} s: nothing can be learned from it"
        )
    run = run.of_steps(range(1))
    chunk = plan.policy.chunk_tokens
    blocks = run.costs(machine).blocks
    found = run.calibrated(machine, measured.compute_s / blocks.blocks, chunk)
    routes = ["disk_bytes_per_s", "h2d_bytes_per_s" if machine.has_bus else "copy_bytes_per_s"]
    disk_s = measured.transfers.read_bytes / blocks.file_bytes * blocks.read_seconds(found)
    if disk_s < measured.bytes_moved / found.load_bytes_per_s:
        # The slower route explains the stall. The other one is then changed only if a difference is
        # left.
        routes.reverse()
    for route in routes:
        found = found.with_figures(**{route: _rate(found, route, run, plan.policy, measured)})
    # A machine may be corrected several times, but the words are added once.
    return replace(found, origin=machine.origin.removesuffix(CORRECTED) + CORRECTED)


def _rate(
    machine: Machine, field: str, run: RunModel, policy: OffloadPolicy, measured: StepRecord
) -> float:
    """Return the rate at which simulated and measured stall are equal.

    If several rates do this, return the nearest to that of `machine`.
    """
    rate: float = machine.to_dict()[field]

    def stall_s(factor: float) -> float:
        tried = machine.with_figures(**{field: rate * factor})
        costs = run.costs(tried, policy.chunk_tokens).by_step
        return predict(costs, policy).timeline.steps[0].stall_s

    present_s = stall_s(1.0)
    if abs(present_s - measured.stall_s) <= STALL_TOLERANCE * measured.wall_s:
        return rate
    too_slow = present_s > measured.stall_s
    far = LARGEST_CHANGE
    if not too_slow:
        far = 1 / LARGEST_CHANGE
    # If another resource limits the step, no rate reproduces the stall. Then find the rate where it
    # becomes constant.
    reachable_s = stall_s(far)
    near_s = SEARCH_TOLERANCE * measured.wall_s
    wanted_s = min(measured.stall_s, reachable_s) - near_s
    if too_slow:
        wanted_s = max(measured.stall_s, reachable_s) + near_s
    if (present_s > wanted_s) != too_slow:
        return rate
    near = 1.0
    for _ in range(BISECTIONS):
        # Rates span orders of magnitude, hence the geometric mean.
        middle = math.sqrt(near * far)
        if (stall_s(middle) > wanted_s) == too_slow:
            near = middle
        else:
            far = middle
    return rate * far
