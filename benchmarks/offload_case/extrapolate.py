"""From a measured run of few blocks to the same run of many: simulated, and never called anything else."""

from __future__ import annotations

import statistics
from typing import Any

from wanstream.plan import compile_program, step_visits
from wanstream.plan.simulator import Hardware, simulate
from wanstream.schema import OffloadPolicy, Timeline, plan_residency


def longer_run(measured: dict[str, Any], *, blocks: int, longer: int) -> dict[str, Any]:
    """Step seconds of a layerwise run with `longer` blocks, from the timeline of one with `blocks`.

    A block takes as long to compute and to move as it took in the measured run; what is outside the blocks stays.
    """
    timeline = Timeline.from_dict(measured)
    experts = [step.expert for step in timeline.steps]
    compute_s = {
        expert: statistics.median(step.compute_s for step in timeline.steps if step.expert == expert) / blocks
        for expert in set(experts)
    }
    outside = statistics.median(step.wall_s - step.compute_s - step.stall_s for step in timeline.steps)
    block_bytes = max(step.bytes_moved for step in timeline.steps) // blocks
    # A run that never waited says of the bus only that it was fast enough; it then was at least this fast.
    waiting = [step for step in timeline.steps[1:] if step.stall_s > 0.05 * step.wall_s]
    rate = min((step.bytes_moved / step.wall_s for step in waiting), default=block_bytes / min(compute_s.values()))
    counts = dict.fromkeys(compute_s, longer)
    residency, buffers = plan_residency(OffloadPolicy.layerwise(), counts)
    hardware = Hardware(
        bus_bytes_per_s=rate,
        block_bytes=dict.fromkeys(counts, block_bytes),
        visit_s=compute_s,
        step_overhead_s=max(0.0, outside),
    )
    simulated = simulate(compile_program(step_visits(experts, counts), residency, buffers), hardware)
    return {
        "blocks": longer,
        "bus_gb_per_s": round(rate / 1e9, 2),
        "bus_was_the_limit": bool(waiting),
        "step_s": [round(step.wall_s, 3) for step in simulated.steps],
        "stall_s": [round(step.stall_s, 3) for step in simulated.steps],
    }
