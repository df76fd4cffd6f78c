"""Which steps each stage of a pipeline computes: an expert each first, then equal seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from .mesh import MeshError


def stage_boundaries(experts_of_steps: Sequence[str], step_costs_s: Sequence[float], stages: int) -> tuple[range, ...]:
    """The steps of each of `stages` stages: together all steps, in order, and no stage without one.

    From two stages on no stage has steps of two experts, so that each worker keeps the one that it has. Among these the
    slowest stage is as short as can be: a queue of videos comes out at its pace.

    Args:
        experts_of_steps: the expert of each step.
        step_costs_s: predicted seconds of each step, 0 or more.
        stages: how many.

    Raises MeshError for more stages than steps, and for fewer (but more than one) than stretches of one expert.
    """
    steps = len(experts_of_steps)
    if len(step_costs_s) != steps:
        raise ValueError(f"{len(step_costs_s)} costs for {steps} steps: give one for each")
    if not 1 <= stages <= steps:
        raise MeshError(f"stage {stages} for {steps} step{'s' * (steps != 1)}: every stage needs one; use 1 to {steps}")
    if stages == 1:
        return (range(steps),)
    stretches = _stretches(experts_of_steps)
    if len(stretches) > stages:
        raise MeshError(
            f"the expert changes {len(stretches) - 1} times, so stages of one expert each are {len(stretches)}, not "
            f"{stages}: use 1, or {len(stretches)} to {steps}"
        )
    split: dict[range, tuple[range, ...]] = {stretch: (stretch,) for stretch in stretches}
    for _ in range(stages - len(stretches)):
        slowest = max(
            (stretch for stretch in stretches if len(split[stretch]) < len(stretch)),
            key=lambda stretch: _slowest(split[stretch], step_costs_s),
        )
        split[slowest] = _balanced(slowest, step_costs_s, len(split[slowest]) + 1)
    return tuple(part for stretch in stretches for part in split[stretch])


def _stretches(experts_of_steps: Sequence[str]) -> list[range]:
    """Steps that follow each other under one expert."""
    ends = list(accumulate(sum(1 for _ in members) for _, members in groupby(experts_of_steps)))
    return [range(first, past) for first, past in zip([0, *ends], ends, strict=False)]


def _slowest(parts: Sequence[range], costs: Sequence[float]) -> float:
    return max(sum(costs[step] for step in part) for part in parts)


def _balanced(steps: range, costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """`steps` cut into that many parts of which the slowest is as short as can be."""
    before = dict(
        zip(range(steps.start, steps.stop + 1), accumulate((costs[s] for s in steps), initial=0.0), strict=True)
    )
    # Per number of steps from the first: the slowest part at best, and where the last part begins.
    best = {past: (before[past], steps.start) for past in range(steps.start + 1, steps.stop + 1)}
    begins = []
    for count in range(2, parts + 1):
        best = {
            past: min(
                (max(best[cut][0], before[past] - before[cut]), cut) for cut in range(steps.start + count - 1, past)
            )
            for past in range(steps.start + count, steps.stop + 1)
        }
        begins.append({past: cut for past, (_, cut) in best.items()})
    cuts = [steps.stop]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return tuple(range(first, past) for first, past in pairwise([steps.start, *reversed(cuts)]))
