"""Stages and parts: steps and samples to compute together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from ...schema import Mesh, MeshError


def stage_boundaries(
    experts_of_steps: Sequence[str], step_costs_s: Sequence[float], stages: int
) -> tuple[range, ...]:
    """Divide the steps into `stages` consecutive, non-empty ranges.

    With two or more stages no stage has steps with two experts, so that each worker keeps one
    expert. Among such divisions the result has the shortest slowest stage, because this stage
    limits the throughput of a video queue.

    Args:
        experts_of_steps: expert for each step.
        step_costs_s: predicted seconds per step, 0 or more.
        stages: number of stages.

    Raises:
        MeshError: more stages than steps, or fewer (but more than one) than the expert changes
            require.
    """
    steps = len(experts_of_steps)
    if len(step_costs_s) != steps:
        raise ValueError(f"{len(step_costs_s)} costs for {steps} steps: give one for each")
    if not 1 <= stages <= steps:
        raise MeshError(
            f"stage {stages} for {steps} step{'s' * (steps != 1)}: every stage needs one; use 1 to "
            f"{steps}"
        )
    if stages == 1:
        return (range(steps),)
    switches = [
        step for step, (last, now) in enumerate(pairwise(experts_of_steps), start=1) if last != now
    ]
    if len(switches) >= stages:
        raise MeshError(
            f"the expert changes {len(switches)} times, so stages of one expert each are "
            f"{len(switches) + 1}, not {stages}: use 1, or {len(switches) + 1} to {steps}"
        )
    before = [0.0, *accumulate(step_costs_s)]

    @cache
    def divide(past: int, parts: int) -> tuple[float, int]:
        """Return the slowest part and last cut in the best division of the steps before `past`."""
        # No part contains a switch, so the last one starts at the last switch at the earliest.
        earliest = max((switch for switch in switches if switch < past), default=0)
        if parts == 1:
            return inf if earliest else before[past], 0
        # Every part needs a step.
        cuts = range(max(earliest, parts - 1), past)
        return min(
            (max(divide(cut, parts - 1)[0], before[past] - before[cut]), cut) for cut in cuts
        )

    ends = [steps]
    # `divide` returns only the last cut, so the parts are found from the end.
    for parts in range(stages, 0, -1):
        ends.append(divide(ends[-1], parts)[1])
    return tuple(range(first, past) for first, past in pairwise(reversed(ends)))


def part_sizes(batch: int, mesh: Mesh) -> list[int]:
    """Return the number of samples in each part of a request.

    The samples in a part are lanes in one pass. With several stages, every sample is a part,
    because a pipeline needs several items. Otherwise each data coordinate gets one part, all about
    equally large, so that the weights are streamed once for all samples in it.
    """
    if mesh.stage > 1:
        return [1] * batch
    parts = min(batch, mesh.data)
    each, more = divmod(batch, parts)
    return [each + (number < more) for number in range(parts)]
